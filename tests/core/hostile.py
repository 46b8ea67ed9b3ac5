"""Malicious names and records, shared by every test that feeds them in."""

BOMBS = {
    "empty": b"",
    "not JSON": b"\x80\x04\x95pickle",
    "not UTF-8": b'{"format":"\xff"}',
    "a number": b"1",
    "a list": b"[]",
    "null": b"null",
    "NaN": b"NaN",
    "infinity": b'{"a":-Infinity}',
    "twice": b'{"format":"x","format":"y"}',
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "many lists": b"[" + b"[]," * 2_000_000 + b"[]]",
    "many objects": b"[" + b"{}," * 2_000_000 + b"{}]",
    "many numbers": b"[" + b"1," * 3_000_000 + b"1]",
    "many strings": b"[" + b'"ab",' * 1_500_000 + b"1]",
    "huge integer": b"[" + b"9" * 4_000_000 + b"]",
    "huge fraction": b"[0." + b"9" * 4_000_000 + b"]",
    "huge exponent": b"[1e" + b"9" * 4_000_000 + b"]",
    "long string": b'["' + b"a" * 8_000_000 + b'"]',
    "escapes": b'["' + b"\\u0000" * 1_000_000 + b'"]',
    "too large": b" " * (65 << 20),
}


HOSTILE = [
    "", ".", "..", "/", "//", "/etc/shadow", "../x", "a/../b", "a/..", "a/./b", "./a", "a//b", "a/", "/a",
    "a\0b", "\0", "a\nb", "a\n", "\n", "a\rb", "a\tb", "a b", " a", "a ", "C:\\x", "C:", "C:/x", "a\\b", "..\\b",
    "\\\\host\\share", "\u202eexe.gpj", "a\u200bb", "e\u0301", "é", "\uff0e\uff0e/x", "a\uff0fb", "\u2024\u2024/x",
    "\u0430", "\u0661", "a\u2028b", "\ud800", "~", "~root", "$HOME", "`id`", "a;b", "a|b", "a&b", "a*", "a?", "[a]",
    "a:b", 'a"b', "a'b", "a#b", "a%2e%2e", "%2e%2e/x", "{a}", "<a>", "\x7f", "\x1b[2J", "a" * 201,
    "/".join(["a" * 100] * 7), "é" * 600, "a/" * 400 + "a" * 300,
]  # fmt: skip
