"""Errors are also of the built-in classes that the programs raise whose place this package takes."""

import pickle

import pytest

from ckpt_async import errors


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("CheckpointConflictError", FileExistsError),  # Composer: a file of another run in the folder
        ("InTheWayError", FileExistsError),  # Composer: a local file exists
        ("UploadFailedError", RuntimeError),  # Composer: uploads failed
        ("SaveFailedError", RuntimeError),
        ("RanksDisagreeError", RuntimeError),  # Composer: the batch differs between ranks
        ("RankFailedError", RuntimeError),  # Composer: a download failed on some ranks
        ("StateMismatchError", RuntimeError),  # torch: load_state_dict
        ("CheckpointRefusedError", ValueError),  # Composer: the validation function
        ("FormatError", ValueError),  # Composer: an unknown tar mode
        ("UnsafePickleError", ValueError),  # Composer: metadata of a newer torch
        ("UnsafePickleError", pickle.UnpicklingError),  # torch.load(weights_only=True)
    ],
)
def test_errors_are_also_what_others_raise(ours: str, theirs: type[Exception]) -> None:
    error = getattr(errors, ours)("why", hint="what to do")
    assert isinstance(error, theirs)
    assert str(error) == "why (what to do)"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_no_error_is_a_bare_base_exception() -> None:
    found = [each for each in vars(errors).values() if isinstance(each, type)]
    assert all(issubclass(each, Exception) for each in found if issubclass(each, BaseException))
