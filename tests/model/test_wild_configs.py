"""Configs as they are published on hubs, with sizes shrunk: each is accepted, or refused by the
name of what is unknown in it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.config_keys import check_settings
from rlk_align.model.shape import read_shape

WILD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "support/wild_configs.json").read_text()
)
"""A model of a hub -> its config, where it was read, and the reason why it is refused."""


def warnings_of(folder: Path, config: dict[str, Any]) -> tuple[str, ...]:
    (folder / "config.json").write_text(json.dumps(config))
    return check_settings(folder, read_config(folder), read_shape(folder).family)


@pytest.mark.parametrize("name", WILD)
def test_a_published_config_is_accepted_or_refused_by_name(tmp_path: Path, name: str) -> None:
    config, refused = WILD[name]["config"], WILD[name]["refused"]
    assert WILD[name]["source"]
    if not refused:
        said = warnings_of(tmp_path, config)
        assert [w.partition(" ")[0] for w in said] == ["auto_map"] * ("auto_map" in config)
        return
    with pytest.raises(ModelError, match=re.escape(refused)):
        warnings_of(tmp_path, config)
