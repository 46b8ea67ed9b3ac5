"""Object keys and local paths <-> the things they name. Each format is defined once, beside its parser. Pure.

Remote, relative to the run's root (`s3://bucket/prefix/run-a`):

    ckpt/<name>.g<generation>/<shard>                        data; never overwritten
    .ckpt-async/generations/<g:06d>.json                     create-once
    .ckpt-async/members/<g:06d>/<rank:05d>.json              create-once: which process is rank r of it
    .ckpt-async/members/<g:06d>/owes-<rank:05d>.json         what a rank that is behind still has to send
    .ckpt-async/members/<g:06d>/alive.json                   heartbeat, counted up until all ranks are there
    .ckpt-async/members/<g:06d>/announced-<step:012d>.json   create-once: watchers tell each other what is complete
    .ckpt-async/members/<g:06d>/ended-<rank:05d>.json        this watcher announces nothing more
    .ckpt-async/receipts/<g:06d>-<step:012d>/<rank:05d>.json
    .ckpt-async/decisions/<g:06d>-<step:012d>.json           LIST order is checkpoint order
    .ckpt-async/latest.json
    .ckpt-async/target.json                                  what all ranks send next, where uploads fall behind
    .ckpt-async/copy.json                                    create-once: an unfinished copy of another run
    .ckpt-async/boundary.json                                which old decisions have been collected
    .ckpt-async/leases/<g:06d>-<step:012d>/<reader>.json     readers, with expiry
    .ckpt-async/damaged/<g:06d>-<step:012d>.json             committed, but found to be unreadable
    .ckpt-async/claims/<sha256 of the key>.json              whose copy is under an exact key
    <any other key>                                          copies of shards, on request
    latest-rank0.pt.symlink                                  Composer's text pointer, on request
    kinds/<kind>/                                            a run of its own: the same layout again

Local, relative to the folder:

    .ckpt-async/journal-<rank:05d>.log                       the rank's events
    .ckpt-async/journal-<rank:05d>.log.<random>.new          what compaction is writing
    .ckpt-async/journal-<rank:05d>.log.damaged-<when>        moved aside; never read again
    .ckpt-async/rank-<rank:05d>.lock                         flock; never replaced
    .ckpt-async/link-<up or down>.json                       what was found out about the link to the store
    .ckpt-async/kept/rank-<rank:05d>/<g:06d>-<step:012d>.json           committed and kept for good
    .ckpt-async/spool/rank-<rank:05d>/<g:06d>-<step:012d>/<shard>       hard links
    .ckpt-async/spool/rank-<rank:05d>/<g:06d>-<step:012d>.json          what was enqueued and sealed (rule R10)
    .ckpt-async/sealed/<run>/rank-<rank:05d>/<g:06d>-<step:012d>.json   what a run without a remote has saved
    .ckpt-async/sealed/<run>/rank-<rank:05d>/unsealed-<launch>          it has not sealed anything in this launch yet
    .ckpt-async/sealed/<run>/rank-<rank:05d>/writing                    names the file that it is writing
    .ckpt-async/kinds/<kind>/                                the same layout again
"""

from __future__ import annotations

import hashlib
import re

from ckpt_async.core.model import CheckpointId

PRIVATE = ".ckpt-async"
DATA = "ckpt/"
GENERATIONS = f"{PRIVATE}/generations/"
MEMBERS = f"{PRIVATE}/members/"
RECEIPTS = f"{PRIVATE}/receipts/"
DECISIONS = f"{PRIVATE}/decisions/"
LEASES = f"{PRIVATE}/leases/"
DAMAGED = f"{PRIVATE}/damaged/"
CLAIMS = f"{PRIVATE}/claims/"
PROBES = f"{PRIVATE}/probe/"
BOUNDARY = f"{PRIVATE}/boundary.json"
COPY = f"{PRIVATE}/copy.json"
LATEST = f"{PRIVATE}/latest.json"
TEMPORARY = f"{PRIVATE}/tmp/"  # noqa: S108 - of a folder as a store
RESERVE = f"{PRIVATE}/tmp/reserve"  # noqa: S108 - a key; of a folder: space to prune in
TARGET = f"{PRIVATE}/target.json"
KINDS = "kinds/"

# One component of a name: what POSIX, S3, GCS, R2 and shells all accept without quoting, plus '=+@,' for Lightning's
# 'epoch=1-step=100.ckpt'. No spaces, backslashes, control or non-ASCII characters: SeaweedFS accepts a newline and
# folds 'p//q' into 'p/q', so ambiguous names must be refused (faults F25, F26). None begins like PRIVATE, as our
# own folders and temporary files do, in capitals either (some file systems ignore case): else whoever can write to a
# bucket could plant a journal in a folder. None begins with '-', which a command would take for an option.
COMPONENT = rf"(?!-|(?i:{re.escape(PRIVATE)}))[A-Za-z0-9._=+@,-]{{1,200}}"

# Wide enough for any run. Larger numbers are refused, because more digits would break the LIST order.
MAX_GENERATION = 10**6 - 1
MAX_STEP = 10**12 - 1
MAX_RANK = 10**5 - 1
# A host name of 64 characters, a process id and a token.
MAX_READER_LENGTH = 84

_CHECKPOINT = re.compile(r"([0-9]{6})-([0-9]{12})")
_GENERATION = re.compile(re.escape(GENERATIONS) + r"([0-9]{6})\.json")
_RECEIPT = re.compile(re.escape(RECEIPTS) + _CHECKPOINT.pattern + r"/([0-9]{5})\.json")
_DECISION = re.compile(re.escape(DECISIONS) + _CHECKPOINT.pattern + r"\.json")
_DAMAGE = re.compile(re.escape(DAMAGED) + _CHECKPOINT.pattern + r"\.json")
_LEASE = re.compile(re.escape(LEASES) + _CHECKPOINT.pattern + r"/[^/]+\.json")
_MEMBER = re.compile(re.escape(MEMBERS) + r"([0-9]{6})/([0-9]{5})\.json")
_OWED = re.compile(re.escape(MEMBERS) + r"([0-9]{6})/owes-([0-9]{5})\.json")
_BEAT = re.compile(re.escape(MEMBERS) + r"([0-9]{6})/alive\.json")
_ANNOUNCED = re.compile(re.escape(MEMBERS) + r"([0-9]{6})/announced-([0-9]{12})\.json")
_ENDED = re.compile(re.escape(MEMBERS) + r"([0-9]{6})/ended-([0-9]{5})\.json")
_DATA = re.compile(re.escape(DATA) + rf"({COMPONENT})\.g([0-9]{{1,6}})/.+")
_JOURNAL = re.compile(r"journal-([0-9]{5})\.log")
_KIND = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_LAST_NUMBER = re.compile(r"([0-9]+)[^0-9]*$")


def _number_in(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.fullmatch(text)
    return int(match[1]) if match else None


def _pair_in(pattern: re.Pattern[str], text: str) -> tuple[int, int] | None:
    match = pattern.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def _checkpoint_in(pattern: re.Pattern[str], text: str) -> CheckpointId | None:
    return CheckpointId(*found) if (found := _pair_in(pattern, text)) else None


def is_kind(text: str) -> bool:
    """Return whether this is a valid name for a kind of checkpoints."""
    return _KIND.fullmatch(text) is not None


def kind_place(kind: str) -> str:
    """Return where a kind is, relative to its run or to `.ckpt-async`; "" for the run itself."""
    return f"{KINDS}{kind}" if kind else ""


def kind_remote(run: str, kind: str) -> str:
    """Return the URL of a kind of this run, which is a run of its own; without a kind, the run's URL unchanged."""
    return f"{run.removesuffix('/')}/{kind_place(kind)}" if kind else run


def run_remote(remote: str, kind: str) -> str:
    """Return the URL of the run that `kind` belongs to: the inverse of `kind_remote`."""
    return remote.removesuffix("/").removesuffix(f"/{kind_place(kind)}") if kind else remote


def path_in(url: str) -> str:
    """Return what follows the bucket or host in a store's URL; for `file://`, the folder.

    `#` and `?` are part of the path, because a folder's name may have them and no store's URL has a query.
    """
    return url.partition("://")[2].partition("/")[2].strip("/")


def parse_kind_key(key: str) -> tuple[str, str] | None:
    """Return the kind that an object of the run belongs to, and its key within that kind; None if it is of no kind."""
    kind, slash, rest = key.removeprefix(KINDS).partition("/")
    return (kind, rest) if key.startswith(KINDS) and slash and is_kind(kind) else None


def checkpoint_tag(checkpoint: CheckpointId) -> str:
    return f"{checkpoint.generation:06d}-{checkpoint.step:012d}"


def parse_checkpoint_tag(tag: str) -> CheckpointId | None:
    return _checkpoint_in(_CHECKPOINT, tag)


def data_prefix(name: str, generation: int) -> str:
    """Return the prefix of a checkpoint's shards. It ends in '/', so that step-1 is not a prefix of step-10 (F26)."""
    return f"{DATA}{name}.g{generation}/"


def data_key(name: str, generation: int, shard: str) -> str:
    return data_prefix(name, generation) + shard


def parse_data_key(key: str) -> tuple[CheckpointId, str] | None:
    """Return the checkpoint and its name; the step is the last number in the name (see `naming.checkpoint_name`)."""
    match = _DATA.fullmatch(key)
    number = _LAST_NUMBER.search(match[1]) if match else None
    if match is None or number is None or len(number[1]) > 12:
        return None
    return CheckpointId(int(match[2]), int(number[1])), match[1]


def lease_key(checkpoint: CheckpointId, reader: str) -> str:
    return f"{leases_prefix(checkpoint)}{reader}.json"


def leases_prefix(checkpoint: CheckpointId) -> str:
    return f"{LEASES}{checkpoint_tag(checkpoint)}/"


def parse_lease_key(key: str) -> CheckpointId | None:
    return _checkpoint_in(_LEASE, key)


def damage_key(checkpoint: CheckpointId) -> str:
    return f"{DAMAGED}{checkpoint_tag(checkpoint)}.json"


def parse_damage_key(key: str) -> CheckpointId | None:
    return _checkpoint_in(_DAMAGE, key)


def claim_key(key: str) -> str:
    """Return the key of the claim on an exact key.

    Hashed, because the exact key may itself be as long as the store allows.
    """
    return f"{CLAIMS}{hashlib.sha256(key.encode()).hexdigest()}.json"


def generation_key(generation: int) -> str:
    return f"{GENERATIONS}{generation:06d}.json"


def parse_generation_key(key: str) -> int | None:
    return _number_in(_GENERATION, key)


def members_prefix(generation: int) -> str:
    return f"{MEMBERS}{generation:06d}/"


def member_key(generation: int, rank: int) -> str:
    return f"{members_prefix(generation)}{rank:05d}.json"


def parse_member_key(key: str) -> tuple[int, int] | None:
    return _pair_in(_MEMBER, key)


def owed_key(generation: int, rank: int) -> str:
    return f"{members_prefix(generation)}owes-{rank:05d}.json"


def parse_owed_key(key: str) -> tuple[int, int] | None:
    return _pair_in(_OWED, key)


def beat_key(generation: int) -> str:
    return f"{members_prefix(generation)}alive.json"


def parse_beat_key(key: str) -> int | None:
    return _number_in(_BEAT, key)


def announcements_prefix(generation: int) -> str:
    return f"{members_prefix(generation)}announced-"


def announcement_key(checkpoint: CheckpointId) -> str:
    return f"{announcements_prefix(checkpoint.generation)}{checkpoint.step:012d}.json"


def parse_announcement_key(key: str) -> CheckpointId | None:
    return _checkpoint_in(_ANNOUNCED, key)


def ended_key(generation: int, rank: int) -> str:
    return f"{members_prefix(generation)}ended-{rank:05d}.json"


def parse_ended_key(key: str) -> tuple[int, int] | None:
    return _pair_in(_ENDED, key)


def receipts_prefix(checkpoint: CheckpointId) -> str:
    return f"{RECEIPTS}{checkpoint_tag(checkpoint)}/"


def receipt_key(checkpoint: CheckpointId, rank: int) -> str:
    return f"{receipts_prefix(checkpoint)}{rank:05d}.json"


def parse_receipt_key(key: str) -> tuple[CheckpointId, int] | None:
    match = _RECEIPT.fullmatch(key)
    return (CheckpointId(int(match[1]), int(match[2])), int(match[3])) if match else None


def decision_key(checkpoint: CheckpointId) -> str:
    return f"{DECISIONS}{checkpoint_tag(checkpoint)}.json"


def parse_decision_key(key: str) -> CheckpointId | None:
    return _checkpoint_in(_DECISION, key)


def journal_name(rank: int) -> str:
    return f"journal-{rank:05d}.log"


def parse_journal_name(name: str) -> int | None:
    return _number_in(_JOURNAL, name)


def longest_keys() -> tuple[str, ...]:
    """Return the longest key of every type of object that a run creates; for shards, with the shortest shard name."""
    last = CheckpointId(MAX_GENERATION, MAX_STEP)
    return (
        *(BOUNDARY, LATEST, generation_key(MAX_GENERATION), member_key(MAX_GENERATION, MAX_RANK)),
        *(receipt_key(last, MAX_RANK), decision_key(last), damage_key(last), claim_key("")),
        lease_key(last, "r" * MAX_READER_LENGTH),
        data_key(f"step-{MAX_STEP}", MAX_GENERATION, "s"),
    )


def lock_name(rank: int) -> str:
    return f"rank-{rank:05d}.lock"


def spool_rank(rank: int) -> str:
    return f"spool/rank-{rank:05d}"


def spool_checkpoint(checkpoint: CheckpointId, rank: int) -> str:
    """Return the folder of a rank's hard links for one checkpoint, relative to `.ckpt-async`."""
    return f"{spool_rank(rank)}/{checkpoint_tag(checkpoint)}"


def spool_manifest(checkpoint: CheckpointId, rank: int) -> str:
    return f"{spool_checkpoint(checkpoint, rank)}.json"


def kept_rank(rank: int) -> str:
    """Return the folder of the checkpoints that a rank keeps for good, relative to `.ckpt-async`."""
    return f"kept/rank-{rank:05d}"


def kept_manifest(checkpoint: CheckpointId, rank: int) -> str:
    return f"{kept_rank(rank)}/{checkpoint_tag(checkpoint)}.json"


def sealed_run(run: str) -> str:
    """Return the folder of what a run has sealed without a remote, relative to `.ckpt-async`."""
    return f"sealed/{run}"


def sealed_rank(run: str, rank: int) -> str:
    return f"{sealed_run(run)}/rank-{rank:05d}"


def sealed_with_remote(run: str, rank: int) -> str:
    """Return the name of the sign that a rank of a run has saved here with a remote, relative to `.ckpt-async`."""
    return f"{sealed_run(run)}/with-remote-{rank:05d}"


def sealed_not_yet(run: str, rank: int, launch: str) -> str:
    """Return the name of the sign that a rank has sealed nothing yet in a launch, relative to `.ckpt-async`."""
    return f"{sealed_rank(run, rank)}/unsealed-{launch}"


def sealed_writing(run: str, rank: int) -> str:
    """Return the name of the file that names the file which a rank is writing, relative to `.ckpt-async`."""
    return f"{sealed_rank(run, rank)}/writing"


def sealed_lock(run: str, rank: int) -> str:
    """Return the name of the lock of a rank that saves without a remote, relative to `.ckpt-async`."""
    return f"{sealed_run(run)}/lock-{rank:05d}"


def sealed_manifest(run: str, checkpoint: CheckpointId, rank: int) -> str:
    return f"{sealed_rank(run, rank)}/{checkpoint_tag(checkpoint)}.json"
