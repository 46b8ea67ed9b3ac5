"""HTTP responses that two readers interpret differently, so that part of one may be taken for the next (RFC 9112,
11.2).
"""

AMBIGUOUS = {
    name: b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\nok"
    for name, head in {
        "two lengths in one": b"Content-Length: 2, 2",
        "two lengths": b"Content-Length: 2\r\nContent-Length: 99",
        "one length twice": b"Content-Length: 2\r\nContent-Length: 2",
        "a length and chunks": b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "a space before the colon": b"Content-Length: 2\r\nTransfer-Encoding : chunked",
        "a line without a colon": b"Content-Length: 2\r\nTransfer-Encoding",
        "a line without a name": b"Content-Length: 2\r\n: x",
        "a folded line": b"X: y\r\n Content-Length: 2",
        "a bare line feed": b"X: y\nContent-Length: 2",
        "a bare carriage return": b"Content-Length: 2\r\nX: y\rZ: 1",
        "a NUL": b"Content-Length: 2\r\nX: \0",
        "a negative length": b"Content-Length: -2",
        "a signed length": b"Content-Length: +2",
        "a length in hexadecimal": b"Content-Length: 0x2",
        "a length in other digits": b"Content-Length: \xb2",
        "a length of 5,000 digits": b"Content-Length: " + b"9" * 5000,
        "an empty length": b"Content-Length:",
    }.items()
}
