"""Contracts: the shipped ones load, and nothing that cannot hold is accepted."""

import tomllib
from pathlib import Path

import pytest

from rlk_align.errors import ContractError
from rlk_align.judge.contract import Contract
from rlk_align.judge.load import BY_DTYPE, built_in, default_contract, load_contract, open_contract
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
    shipped = {"bf16", "bf16-statistical", "fp16", "fp32", "bitwise", "ws1"}
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
BY_METRIC = {
    "max_abs_dlogp",
    "mean_abs_dlogp",
    "p99_abs_dlogp",
    "k3",
    "ratio_mean_error",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_shipped_limits_are_calibrated_and_leave_room(name: str) -> None:
    """Every limit of tokens names the largest value of healthy pairs, warns from there on and
    fails well above it; a maximum knows the number of tokens."""
    dtype = next(d for d, n in BY_DTYPE.items() if n == name)
    contract = load_contract(name, dtype)
    limits = {x.metric: x for x in contract.limits if not x.of_site}
    assert limits.keys() >= BY_METRIC
    for metric in BY_METRIC:
        limit = limits[metric]
        assert limit.source.startswith("measured: "), metric
        assert 0 < limit.healthy <= limit.warn < limit.fail, metric
        assert limit.fail >= 1.2 * limit.healthy, metric
    largest = limits["max_abs_dlogp"]
    assert largest.tail is not None
    assert largest.healthy <= largest.fail_at(2000) < largest.fail_at(100_000) <= largest.fail
    for op_class, place in (("elementwise", 0), ("reduction", 1), ("matmul", 1), ("attention", 2)):
        [limit] = [x for x in contract.limits if op_class in (x.op_classes or ())]
        atol, rtol = OPERATORS[name][place]
        assert limit.atol <= atol
        assert limit.rtol <= rtol
        assert limit.fail <= 1


def test_a_contract_of_ones_own_loads_by_path(write) -> None:
    contract = load_contract(write(), "bfloat16")
    assert (contract.id, contract.version) == ("mine", "1.2.3")
    assert contract.limits[0].fail == 0.1


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
        {"min_coverage": 0},
        {"min_coverage": 1.01},
        {"min_coverage": "raw:nan"},
        {"min_coverage": -0.5},
        {"min_tokens": 0},
        {"min_tokens": 1.5},
        {"dtypes": "bfloat16"},
        {"owner": "me"},
    ],
    ids=str,
)
def test_a_head_that_cannot_hold_is_refused(write, head: dict) -> None:
    with pytest.raises(ContractError, match=next(iter(head))):
        load_contract(write(head), "bfloat16")


OPERATOR = {"metric": "op_error", "atol": 0.1, "rtol": 0.1, "fail": 1}


@pytest.mark.parametrize(
    "limit",
    [
        {"fail": "raw:nan"},
        {"fail": "raw:inf"},
        {"fail": -1e-9},
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
    with pytest.raises(ContractError, match="limits"):
        load_contract(write({}, limit), "bfloat16")


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
