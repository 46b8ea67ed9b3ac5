"""What a process finds of earlier launches of a rank on this node, and what follows from it. Pure.

The journal says most of it; the rest is in the manifests of the spool (rule R10). `engine/recovery.py` reads both, asks
the store, and acts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_async.core.backlog import undecided
from ckpt_async.core.local_state import Local, LocalCheckpoint, LocalShard
from ckpt_async.core.model import (
    CheckpointId,
    Enqueued,
    Event,
    Failed,
    FileIdentity,
    Opened,
    RemoteAddress,
    Shard,
    StartedOver,
    Unproven,
    without_slash,
)
from ckpt_async.core.records import Manifest
from ckpt_async.errors import FailureReason, JournalError

# How many earlier generations the journal remembers, by their nonces.
NUM_EARLIER = 100


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What this node has of a rank: its journal, and what that has lost and a manifest in the spool knows, oldest
    first.
    """

    local: Local
    lost: Mapping[CheckpointId, Manifest] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """The newest generation of which this rank has anything; 0 if there is none."""
        return self.local.generation or max(self.nonces, default=0)

    @property
    def nonces(self) -> dict[int, str]:
        """The nonces, as far as they are known, of the generation that this rank has opened last, and of those of which
        it has something left.
        """
        lost = {id_.generation: found.nonce for id_, found in self.lost.items() if found.nonce}
        left = {self.local.generation, *lost, *(each.id.generation for each in undecided(self.local))}
        return {number: nonce for number, nonce in {**lost, **self._opened}.items() if number in left}

    @property
    def _opened(self) -> Mapping[int, str]:
        return self.local.opened.nonces if self.local.opened else {}

    @property
    def unfinished(self) -> list[tuple[CheckpointId, Shard]]:
        """The shards that may not be in the store yet."""
        known = [(each.id, of.shard) for each in undecided(self.local) for of in each.shards.values()]
        return known + [(id_, each.shard) for id_, found in self.lost.items() for each in found.enqueued]

    def is_of_another(self, url: str) -> bool:
        """Return whether the newest launch in the journal used another remote than `url`."""
        return self.local.remote is not None and self.local.remote.url != without_slash(url)

    def unfinished_elsewhere(self, url: str) -> tuple[CheckpointId, str] | None:
        """Return a checkpoint that may be unfinished and was begun at another remote than `url`, and that remote's URL;
        None if there is none.

        Shards that were verified there are not at `url`, so a commit at `url` would name shards that do not exist (R1).
        """
        if self.local.remote is not None and self.is_of_another(url) and (left := undecided(self.local)):
            return left[-1].id, self.local.remote.url
        lost = ((id_, found.remote) for id_, found in self.lost.items())
        return next(((id_, there) for id_, there in lost if there != without_slash(url)), None)

    def remote_of_lost(self) -> str:
        """Return the URL of the remote that the manifests name, if the journal has lost it; "" if they name none, or
        several.
        """
        remotes = {found.remote for found in self.lost.values()}
        return remotes.pop() if len(remotes) == 1 else ""

    def committed_in_newest(self) -> list[CheckpointId]:
        """Return what this rank knows to be committed of the generation that it has opened last, oldest first.

        What earlier generations have committed is not included: the launch after them has asked for it.
        """
        known = {id_ for id_, each in self.local.checkpoints.items() if each.was_committed}
        known |= {self.local.newest_committed} if self.local.newest_committed is not None else set()
        return sorted(id_ for id_ in known if id_.generation == self.local.generation)

    def unproven(self, address: RemoteAddress) -> list[CheckpointId]:
        """Return the unfinished checkpoints that were begun at the same URL of another server.

        It may be the same store under a new name, or a replica that lacks what the first one had verified. So what was
        verified there must be asked for again before a commit may name it (R1).
        """
        known = self.local.remote
        if known is None or known.url != address.url or known.endpoint_url == address.endpoint_url:
            return []
        return [each.id for each in undecided(self.local)]

    # --- what is written to the journal --------------------------------------------------------------------

    def opened_at(self, address: RemoteAddress) -> Opened:
        """Return the newest launch that the journal knows, at this address; if the journal is lost, the newest that the
        manifests know. These also have the nonces that the journal has lost, without which receipts would differ from
        those in the store.
        """
        opened = self.local.opened or Opened(0, 1, address)
        lost = {id_.generation: found for id_, found in self.lost.items()}
        if self.local.opened is None and lost:
            number, newest = max(lost.items(), key=lambda each: each[0])
            world_size = newest.sealed.world_size if newest.sealed else 1
            opened = Opened(number, world_size, address, nonce=newest.nonce)
        nonces = {number: found.nonce for number, found in lost.items() if found.nonce}
        return replace(opened, remote=address, earlier=tuple(sorted((nonces | dict(opened.earlier)).items())))

    def may_open(self, number: int, url: str, *, is_again: bool) -> bool:
        """Return whether a launch may have this generation: it is newer than what this rank has, unless another process
        of the same launch had opened it (`is_again`). Otherwise the store has lost those.
        """
        return self.is_of_another(url) or number >= self.generation + (not is_again)

    def rows_of(self, opened: Opened, unproven: Iterable[CheckpointId]) -> list[Event]:
        """Return what a launch writes when it has its generation."""
        if self.is_of_another(opened.remote.url):
            # Another remote's generations would be mistaken for this one's.
            return [StartedOver(), opened, *map(Unproven, unproven)]
        earlier = tuple(sorted({**self.nonces, **self._opened}.items()))[-NUM_EARLIER:]
        return [replace(opened, earlier=earlier), *map(Unproven, unproven)]


def completing(found: Manifest, known: LocalCheckpoint) -> list[Event]:
    """Return what a manifest knows about a checkpoint and the journal does not, which may have lost only its tail."""
    if known.decision is not None:
        return []
    lost: list[Event] = [each for each in found.enqueued if each.shard.name not in known.shards]
    return [*lost, found.sealed] if found.sealed is not None and known.sealed is None else lost


def adopted(checkpoint: LocalCheckpoint, shard: Shard, found: FileIdentity | None) -> Enqueued | None:
    """Return the event that a copied file takes the place of the one that was enqueued, if it is as long and as old."""
    if found is None or found == shard.identity or not found.is_as_long_and_old_as(shard.identity):
        return None
    return Enqueued(checkpoint.id, checkpoint.name, replace(shard, identity=found))


def doubtful_after_reboot(checkpoint: LocalCheckpoint) -> list[LocalShard]:
    """Return the shards that may not have survived a reboot, as far as the journal knows.

    Power loss can leave a file its size and times but not its bytes.
    """
    if checkpoint.decision is not None:
        return []
    return [each for each in checkpoint.shards.values() if not each.is_durable and each.stored is None]


def lost_by_reboot(checkpoint: LocalCheckpoint, safe: Collection[str], folder: str) -> list[Failed]:
    """Return the failures of those that a manifest does not list either (`safe`). What it lists is sure to be fsynced,
    because it is written after the fsync, and durably.
    """
    return [
        Failed(
            checkpoint.id,
            each.shard.name,
            FailureReason.SOURCE_CHANGED,
            f"shard {f'{folder}/{each.shard.source}'!r} was not fsynced yet when the machine went down",
        )
        for each in doubtful_after_reboot(checkpoint)
        if each.shard.name not in safe
    ]


# --- refusals ----------------------------------------------------------------------------------------------

TAKEN = (
    "another launch has taken the generation, because the remote was wiped or put back meanwhile: nothing more is"
    " uploaded, and the files stay in the folder"
)
_OTHER_REMOTE = "continue with a new remote URL, or with another folder, on all ranks; files"


def wiped(found: OnDisk, folder: str, address: RemoteAddress) -> JournalError:
    """Return the error about a store that does not know what this rank did there. To go on would write under the keys
    of another launch.
    """
    return JournalError(
        f"rank {found.local.rank} has opened generation {found.generation} of {address.url!r} (says the journal of"
        f" {folder!r}), but {_store(address)} does not know of that, and may have given that number or an earlier one"
        " to another launch: the remote was wiped or put back, or this is another store",
        hint="nothing was changed, because another launch's files would be overwritten. Check the URL and the endpoint."
        f" If the remote was emptied on purpose, {_OTHER_REMOTE} that are only in this folder stay there",
    )


def put_back(gone: Sequence[CheckpointId], local: Local, folder: str, address: RemoteAddress) -> JournalError:
    """Return the error about a store that has lost what it had committed. To go on would save the same steps again, and
    replace files that may be all that is left of them.
    """
    more = f"{len(gone) - 8} more, " if gone[8:] else ""
    return JournalError(
        f"rank {local.rank} knows of commits in generation {local.generation} of {address.url!r} (says the journal of"
        f" {folder!r}), of which {_store(address)} has no record: steps"
        f" {more}{', '.join(str(each.step) for each in gone[-8:])}. The remote was put back to an older state, or this"
        " is another store",
        hint="nothing was changed. Check the URL and the endpoint, or put the missing objects back. If the remote was"
        f" put back on purpose, {_OTHER_REMOTE} of these steps that are still in this folder stay there",
    )


def _store(address: RemoteAddress) -> str:
    return f"the store at {address.endpoint_url}" if address.endpoint_url else "the store"
