"""Where a setting's value comes from, and that an unusable one is refused by name at the start."""

import dataclasses
from typing import Any

import pytest

from ckpt_async.core.settings import ENVIRONMENT_PREFIX, Settings, load
from ckpt_async.errors import SettingsError

FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
NUMBERS = [name for name, field in FIELDS.items() if field.metadata["low"] is not None]


def test_arguments_override_environment_override_file_override_default() -> None:
    """The order of precedence is the same everywhere."""
    name, toml = "num_concurrent_uploads", "num_concurrent_uploads = 3"
    variable = {ENVIRONMENT_PREFIX + name.upper(): "4"}
    assert Settings().num_concurrent_uploads == load({}, {}).num_concurrent_uploads
    assert load({}, {}, toml).num_concurrent_uploads == 3
    assert load({}, variable, toml).num_concurrent_uploads == 4
    assert load({name: 5}, variable, toml).num_concurrent_uploads == 5
    assert load({name: None}, variable, toml).num_concurrent_uploads == 4


def test_file_may_be_a_pyproject() -> None:
    """Only the project's `[tool.ckpt_async]` table is read; the rest of the file is not ours."""
    assert load({}, {}, "[tool.ckpt_async]\nmetrics_port = 9\n[tool.ruff]\nx = 1").metrics_port == 9
    assert load({}, {}, "[project]\nname = 'x'") == Settings()


def wrong_values(name: str) -> list[Any]:
    field = FIELDS[name]
    low, high = field.metadata["low"], field.metadata["high"]
    wrong: list[Any] = [[], {}, b"1", object()]
    match field.type:
        case "int":
            return [*wrong, True, "1", 1.5, low - 1, high + 1]
        case "float":
            nothing = float("nan")
            return [*wrong, True, "1", nothing, float("inf"), -float("inf"), low - 1, high * 2 + 1]
        case "bool":
            return [*wrong, 1, "true"]
        case _:
            return [*wrong, 1, True, *(["neither"] if "choices" in field.metadata else [])]


@pytest.mark.parametrize("name", FIELDS)
def test_invalid_value_is_rejected_with_its_name(name: str) -> None:
    """The error comes at the start with the name and the allowed values, not hours later in a thread."""
    for value in wrong_values(name):
        with pytest.raises(SettingsError, match=name) as caught:
            Settings(**{name: value})
        if name in NUMBERS:
            assert str(FIELDS[name].metadata["high"]) in str(caught.value)
        with pytest.raises(SettingsError, match=name):
            load({name: value}, {})


@pytest.mark.parametrize("name", NUMBERS)
def test_environment_values_are_validated(name: str) -> None:
    """The error names the environment variable, because that is what the operator sees."""
    variable = ENVIRONMENT_PREFIX + name.upper()
    for text in ("", "x", "nan", "1e400", "9" * 5000):
        with pytest.raises(SettingsError, match=variable):
            load({}, {variable: text})


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds_are_inclusive(name: str) -> None:
    """An off-by-one error would refuse a value that the documentation allows."""
    low, high = FIELDS[name].metadata["low"], FIELDS[name].metadata["high"]
    others = {"retry_initial_s": {"retry_max_s": 3600.0}, "decision_poll_s": {"decision_poll_max_s": 3600.0}}
    lows = {"retry_max_s": {"retry_initial_s": 0.001}, "decision_poll_max_s": {"decision_poll_s": 0.01}}
    assert getattr(load({**lows.get(name, {}), name: low}, {}), name) == low
    assert getattr(load({**others.get(name, {}), name: high}, {}), name) == high


def test_an_empty_metrics_address_is_rejected() -> None:
    """An empty address, such as from an unset variable, would expose the metrics to the whole network."""
    with pytest.raises(SettingsError, match=r"metrics_address is ''.* 0\.0\.0\.0"):
        load({}, {"CKPT_ASYNC_METRICS_ADDRESS": ""})


def test_unknown_name_suggests_the_nearest() -> None:
    """A typo must not silently keep the default."""
    with pytest.raises(SettingsError, match="num_concurrent_uploads"):
        load({"num_concurent_uploads": 3}, {})
    with pytest.raises(SettingsError, match=r"settings file: .*did you mean metrics_port"):
        load({}, {}, "metrics_prt = 1")


def test_misspelt_variable_is_rejected_and_unrelated_ones_are_ignored() -> None:
    """A misspelt variable would silently keep the default. But Kubernetes sets CKPT_ASYNC_SERVICE_HOST for a service
    called ckpt-async.
    """
    with pytest.raises(SettingsError, match="did you mean CKPT_ASYNC_NUM_CHECKPOINTS_TO_KEEP"):
        load({}, {"CKPT_ASYNC_NUM_CHECKPOINT_TO_KEEP": "3"})
    others = (
        "SERVICE_HOST SERVICE_PORT PORT METRICS_SERVICE_PORT LAUNCH_ID SETTINGS_FILE DEBUG SEED TORCH_INDEX"
    )
    assert load({}, {f"CKPT_ASYNC_{name}": "x" for name in others.split()}) == Settings()


@pytest.mark.fault("F52")
@pytest.mark.parametrize(
    "toml",
    [
        *("x", "metrics_port = ", "metrics_port = '1'", "metrics_port = true", "[metrics_port]"),
        "[tool]\nckpt_async = 5",
        f"x = {'[' * 100_000}",
        f"upload_timeout_s = 1{'0' * 400}",
        f"metrics_port = 1{'0' * 400}",
        f"metrics_port = 1{'0' * 5000}",
    ],
    ids=range(10),
)
def test_invalid_settings_file_is_rejected(toml: str) -> None:
    """The user must see our error, naming the settings file."""
    with pytest.raises(SettingsError, match=r"^settings file") as caught:
        load({}, {}, toml)
    assert len(str(caught.value)) < 300


def test_maximum_backoff_must_not_be_below_the_initial_one() -> None:
    """Back-off that shrinks would hammer a store that is down."""
    with pytest.raises(SettingsError, match="retry_max_s"):
        Settings(retry_initial_s=5.0, retry_max_s=1.0)
    with pytest.raises(SettingsError, match="decision_poll_max_s"):
        Settings(decision_poll_s=5.0, decision_poll_max_s=1.0)
