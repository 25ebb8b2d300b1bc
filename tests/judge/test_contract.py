"""Contracts: the shipped ones load, and nothing that cannot hold is accepted."""

import tomllib
from pathlib import Path

import pytest

from rlk_align.data import data_path
from rlk_align.errors import ContractError
from rlk_align.judge.contract import LAW_METRICS, Contract
from rlk_align.judge.load import BY_DTYPE, built_in, default_contract, load_contract, open_contract
from rlk_align.logs.diagnose.contract import load_run_contract
from rlk_align.model.dtypes import lower_precision

LIMIT = {"id": "x", "metric": "k3", "fail": 0.1, "why": "w", "source": "derived: s"}
HEAD = {
    "id": "mine",
    "version": "1.2.3",
    "description": "d",
    "dtypes": ["bfloat16"],
    "min_coverage": 0.9,
    "min_tokens": 1,
}


def toml(value: object) -> str:
    """The TOML spelling of what a contract holds."""
    if isinstance(value, dict):
        return "\n".join(f"{k} = {toml(v)}" for k, v in value.items())
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        return value.removeprefix("raw:") if value.startswith("raw:") else f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture
def write(tmp_path: Path):
    def contract(head: dict | None = None, *limits: dict) -> str:
        text = toml({k: v for k, v in (HEAD | (head or {})).items() if v is not None})
        for limit in limits or ({},):
            kept = {k: v for k, v in (LIMIT | limit).items() if v is not None}
            text += "\n[[limits]]\n" + toml(kept)
        path = tmp_path / "c.toml"
        path.write_text(text)
        return str(path)

    return contract


SHIPPED = [
    (path.stem, dtype)
    for path in built_in().values()
    for dtype in tomllib.loads(path.read_text())["dtypes"]
]


@pytest.mark.parametrize(("name", "dtype"), SHIPPED)
def test_shipped_contracts_load_for_their_dtypes(name: str, dtype: str) -> None:
    contract = load_contract(name, dtype)
    assert contract.id == name
    assert all(limit.why and limit.source for limit in contract.limits)
    kinds = ("published: ", "measured: ", "derived: ")
    assert all(limit.source.startswith(kinds) for limit in contract.limits)


def test_every_dtype_has_a_default_and_bitwise_covers_them_all() -> None:
    shipped = {"bf16", "bf16-strict", "bf16-statistical", "fp16", "fp32", "bitwise", "ws1"}
    assert {name for name, _ in SHIPPED} == shipped
    for dtype in BY_DTYPE:
        assert (default_contract(dtype), dtype) in SHIPPED
        assert ("bitwise", dtype) in SHIPPED
    with pytest.raises(ContractError, match="float64"):
        default_contract("float64")


OPERATORS = {
    "fp32": ((1e-5, 1e-5), (1e-4, 1e-4), (1e-4, 1e-4)),
    "fp16": ((2.5e-3, 2.5e-3), (1e-3, 1e-3), (8e-3, 8e-3)),
    "bf16": ((2e-2, 1.6e-2), (5e-2, 2e-2), (8e-2, 3e-2)),
}
"""(atol, rtol) of elementwise operators, of sums, and of attention."""


@pytest.mark.parametrize("name", OPERATORS)
def test_shipped_limits_leave_room_above_healthy_values(name: str) -> None:
    """The limits of tokens are those of the law of noise alone, and those of distributions follow
    from them; an excess knows the number of tokens; tolerances of operators hold only where no
    budget does; raw figures have ranges."""
    dtype = next(d for d, n in BY_DTYPE.items() if n == name)
    contract = load_contract(name, dtype)
    limits = {x.metric: x for x in contract.limits if not x.of_site}
    of_distributions = {"kl", "reverse_kl", "total_variation", "token_excess"}
    assert limits.keys() == {*LAW_METRICS, *of_distributions}
    assert limits["total_variation"].fail <= limits["noise_c"].fail / 2
    assert limits["kl"].fail == limits["reverse_kl"].fail <= limits["noise_c"].fail ** 2 / 2
    for limit in limits.values():
        assert limit.healthy is None or limit.fail_at(400) >= 1.2 * limit.healthy, limit.id
    largest = limits["excess"]
    assert largest.fail_at(400) < largest.fail_at(100_000) <= largest.fail
    for op_class, place in (("elementwise", 0), ("reduction", 1), ("matmul", 1), ("attention", 2)):
        [limit] = [x for x in contract.limits if op_class in (x.op_classes or ())]
        atol, rtol = OPERATORS[name][place]
        assert limit.atol <= atol
        assert limit.rtol <= rtol
        assert limit.fail <= 1
        assert limit.unrefereed
    assert contract.healthy is not None
    assert {
        "max_abs_dlogp",
        "mean_abs_dlogp",
        "p99_abs_dlogp",
        "k3",
    } <= contract.healthy.ranges.keys()


def test_runs_are_judged_by_the_same_law() -> None:
    """`compare` and `explain` put the same limits to a token."""
    run = load_run_contract()
    for dtype, name in BY_DTYPE.items():
        limits = {x.metric: x for x in load_contract(name, dtype).limits}
        assert limits["noise_c"].fail == run.limit("quantisation", dtype=dtype)
        assert limits["ratio_bias"].fail == run.limit("numerics")
        excess, token = limits["excess"], run.single_token(dtype)
        assert token is not None
        assert (excess.floor, excess.fail, excess.tail) == (token.floor, token.fail, token.tail)


FIGURES = {
    "A": (13_364, 0.0176, 0.248, 0.378),
    "B": (4_451, 0.0155, 0.215, 0.475),
    "C": (10_000, 0.0146, 0.504, 0.372),
    "D": (14_534, 0.0155, 1.139, 0.365),
}
"""Four published healthy runs of NeMo-RL: tokens, mean |Δ|, max |Δ|, mean 1 − p."""


@pytest.mark.parametrize("run", FIGURES)
def test_published_healthy_runs_pass_by_their_figures(run: str) -> None:
    tokens, mean, largest, room = FIGURES[run]
    limits = {x.metric: x for x in load_contract("bf16", "bfloat16").limits}
    c = mean / room
    assert c <= limits["noise_c"].fail
    # The token's own 1 − p is not published; it was hardly less than the mean.
    assert largest / room / c <= 0.5 * limits["excess"].fail_at(tokens)


def test_the_strict_contract_has_the_figures_of_the_embedded_model() -> None:
    strict = load_contract("bf16-strict", "bfloat16")
    fails = {x.id: x.fail for x in strict.limits}
    assert fails["mean-dlogp"] == 0.007
    assert fails["k3"] == 2e-4
    assert strict.alike is None
    assert strict.budget("k_proj").row_gain == 0.3
    assert not strict.budget("k_proj").row_rms_by_width


EARLIER = {
    ("bf16", "4.1.1"): "858b1a7d5eeb23f34044db098e3aba4b6f134c792fd7c5f0943403614585195e",
    ("fp16", "4.1.1"): "59d73c7720882c3c663170148898e72a3d6f44cfa6a50507ad5d499064922b40",
    ("fp32", "3.1.0"): "1c6860e6a8b80be3f80a02137ac6a25abc2d3a39c72cc34b240a1bad8fd39c63",
}
"""The contracts that were built in before, as users' contracts pin them."""


@pytest.mark.parametrize(("name", "version"), EARLIER)
def test_what_extends_an_earlier_version_judges_by_it(
    name: str, version: str, tmp_path: Path
) -> None:
    ours = tmp_path / "ours.toml"
    ours.write_text(
        f'id = "ours"\nversion = "1.0.0"\n[extends]\nid = "{name}"\nversion = "{version}"\n'
        f'sha256 = "{EARLIER[name, version]}"\n'
    )
    contract = open_contract(str(ours))
    assert {"max_abs_dlogp", "mean_abs_dlogp", "k3"} <= {x.metric for x in contract.limits}
    assert (contract.alike, contract.healthy) == (None, None)
    assert not any(b.row_rms_by_width for b in contract.budgets)
    ours.write_text(ours.read_text().replace(version, "1.1.1"))
    with pytest.raises(ContractError, match=r"version 1\.1\.1"):
        open_contract(str(ours))


def test_a_contract_of_ones_own_loads_by_path(write) -> None:
    path = write()
    contract = load_contract(path, "bfloat16")
    assert (contract.id, contract.version, contract.reference) == ("mine", "1.2.3", path)
    assert contract.limits[0].fail == 0.1
    assert load_contract(write({}, {"fail": 1}), "bfloat16").limits, "a whole number is one too"


def test_the_hash_is_of_what_it_says(write) -> None:
    path = Path(write())
    first = load_contract(str(path), "bfloat16").sha256
    path.write_text("# a comment\n\n" + path.read_text())
    assert load_contract(str(path), "bfloat16").sha256 == first
    assert len(first) == 64
    others = {
        load_contract(write({}, {"fail": 0.2}), "bfloat16").sha256,
        load_contract(write({"version": "1.2.4"}), "bfloat16").sha256,
        load_contract(write({"min_tokens": 2}), "bfloat16").sha256,
    }
    assert len(others | {first}) == 4


def test_a_dtype_without_an_entry_is_an_error(write) -> None:
    for name in ("bf16", write()):
        with pytest.raises(ContractError, match="float32") as error:
            load_contract(name, "float32")
        assert "bfloat16" in error.value.fix


@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "../contracts/bf16",
        "/bf16",
        "..",
        "",
        "./bf16",
        "sub/bf16",
        "nope.toml",
        "../../bf16.toml",
    ],
)
def test_what_is_no_contract_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContractError) as error:
        load_contract(name, "bfloat16")
    assert "bf16, bitwise, fp16, fp32" in error.value.fix


def test_every_missing_field_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('id = "x"\ndtypes = ["bfloat16"]\n[[limits]]\nid = "a"\nmetric = "k3"\n')
    with pytest.raises(ContractError) as error:
        open_contract(str(path))
    assert error.value.message == (
        f"{path}: 7 required fields are missing: version, description, min_coverage, min_tokens, "
        "limits.0.fail, limits.0.why, limits.0.source"
    )
    assert "contract schema" in error.value.fix


def test_a_byte_order_mark_and_other_line_ends_change_nothing(write) -> None:
    path = Path(write())
    plain = open_contract(str(path)).sha256
    text = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"))
    assert open_contract(str(path)).sha256 == plain
    path.write_bytes(text.decode().encode("utf-16"))
    with pytest.raises(ContractError, match=r"UTF-16.*save it as UTF-8"):
        open_contract(str(path))


@pytest.mark.parametrize("data", [b"id = ", b"\xff\xfe", b"[[limits]\n", b"id = 1\nid = 2"])
def test_what_is_not_toml_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(data)
    with pytest.raises(ContractError, match="TOML"):
        load_contract(str(path), "bfloat16")


@pytest.mark.parametrize("field", HEAD)
def test_every_field_is_needed(write, field: str) -> None:
    with pytest.raises(ContractError, match=field):
        load_contract(write({field: None}), "bfloat16")


@pytest.mark.parametrize("field", LIMIT)
def test_every_field_of_a_limit_is_needed(write, field: str) -> None:
    with pytest.raises(ContractError, match=field):
        load_contract(write({}, {field: None}), "bfloat16")


@pytest.mark.parametrize(
    "head",
    [
        {"version": "1.0"},
        {"version": "v1.0.0"},
        {"version": "1.0.0\\n"},
        {"id": ""},
        {"id": "my\\u001b[31m contract"},
        {"min_coverage": 0},
        {"min_coverage": 1.01},
        {"min_coverage": "raw:nan"},
        {"min_coverage": -0.5},
        {"min_coverage": True},
        {"min_tokens": 0},
        {"min_tokens": 1.5},
        {"min_tokens": "raw:32.0"},
        {"min_tokens": "32"},
        {"dtypes": "bfloat16"},
        {"dtypes": []},
        {"dtypes": ["bf16"]},
        {"owner": "me"},
    ],
    ids=str,
)
def test_a_head_that_cannot_hold_is_refused(write, head: dict) -> None:
    with pytest.raises(ContractError, match=next(iter(head))) as error:
        load_contract(write(head), "bfloat16")
    assert_one_clear_line(error.value.message)


def assert_one_clear_line(message: str) -> None:
    assert "http" not in message
    assert ": :" not in message
    assert "\n" not in message


OPERATOR = {"metric": "op_error", "atol": 0.1, "rtol": 0.1, "fail": 1}


@pytest.mark.parametrize(
    "limit",
    [
        {"fail": "raw:nan"},
        {"fail": "raw:inf"},
        {"fail": -1e-9},
        {"fail": "0.06"},
        {"fail": True},
        {"id": ""},
        {"why": ""},
        {"why": "  "},
        {"source": ""},
        {"metric": "max_abs"},
        {"metric": "tokens"},
        {"metric": "k3", "atol": 0.1, "rtol": 0.1},
        {"metric": "k3", "op_classes": ["matmul"]},
        {"metric": "op_error"},
        OPERATOR | {"atol": None},
        OPERATOR | {"rtol": None},
        OPERATOR | {"atol": -0.1},
        OPERATOR | {"rtol": -0.1},
        OPERATOR | {"atol": "raw:nan"},
        OPERATOR | {"rtol": "raw:nan"},
        OPERATOR | {"atol": "raw:inf"},
        OPERATOR | {"rtol": "raw:inf"},
        OPERATOR | {"op_classes": ["matmuls"]},
        {"metric": "rows_differ", "atol": 0.1, "rtol": 0.1},
        {"edges": ["prefil_vs_train"]},
        {"edges": []},
        OPERATOR | {"op_classes": []},
        {"warning": 1},
    ],
    ids=str,
)
def test_a_limit_that_cannot_hold_is_refused(write, limit: dict) -> None:
    with pytest.raises(ContractError, match="limits") as error:
        load_contract(write({}, limit), "bfloat16")
    assert_one_clear_line(error.value.message)


def test_tolerances_of_another_metric_are_named(write) -> None:
    with pytest.raises(ContractError, match="atol and rtol belong to op_error"):
        load_contract(write({}, {"metric": "op_error"}), "bfloat16")


def test_the_id_of_a_built_in_contract_is_its_own(write, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="belongs to a built-in contract"):
        load_contract(write({"id": "bf16"}), "bfloat16")
    same = (data_path("contracts") / "bf16.toml").read_text(encoding="utf-8")
    (copy := tmp_path / "copy.toml").write_text(f"# a copy\n{same}")
    assert load_contract(str(copy), "bfloat16").id == "bf16"
    assert load_contract("bf16", "bfloat16").reference == "bf16"


def test_limits_have_ids_of_their_own(write) -> None:
    with pytest.raises(ContractError, match="unique"):
        load_contract(write({}, {}, {"fail": 0.2}), "bfloat16")
    assert len(load_contract(write({}, {}, {"id": "y"}), "bfloat16").limits) == 2


def test_a_contract_without_limits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(toml(HEAD) + "\nlimits = []\n")
    with pytest.raises(ContractError, match="limits"):
        load_contract(str(path), "bfloat16")


def test_the_lower_precision_of_two() -> None:
    order = ["float64", "float32", "float16", "bfloat16"]
    for i, a in enumerate(order):
        for j, b in enumerate(order):
            assert lower_precision(a, b) == order[max(i, j)]


def test_a_contract_is_frozen() -> None:
    contract = load_contract("bf16", "bfloat16")
    with pytest.raises(ValueError, match="frozen"):
        contract.min_tokens = 0
    assert isinstance(contract, Contract)
