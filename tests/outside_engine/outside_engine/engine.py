"""The engine: its table of places, and its passes over a batch."""

import numpy as np
import torch
from outside_engine.model import Layer
from rlk_align.engines.base import Engine, Sampled
from rlk_align.engines.common import attributes, places
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.logprobs import token_logprobs
from rlk_align.engines.common.parameters import LiveParameter, record_parameter
from rlk_align.engines.common.places import SECOND, Place
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.common.site_hooks import LiveRows, SiteHooks
from rlk_align.engines.common.user_patch import apply_patch
