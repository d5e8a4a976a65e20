"""Layers for models, ops and backends written elsewhere. Importing this module imports torch."""

from octavo.core.layers.blocks import *
from octavo.core.layers.blocks import __all__ as _blocks
from octavo.core.layers.build import *
from octavo.core.layers.build import __all__ as _build
from octavo.core.layers.context import LayerCache, StepContext
from octavo.core.layers.decoder import *
from octavo.core.layers.decoder import __all__ as _decoder
from octavo.core.layers.dtypes import *
from octavo.core.layers.dtypes import __all__ as _dtypes
from octavo.core.layers.linear import *
from octavo.core.layers.linear import __all__ as _linear
from octavo.core.layers.ops import Ops
from octavo.core.layers.rope import *
from octavo.core.layers.rope import __all__ as _rope

__all__ = ["LayerCache", "Ops", "StepContext", *_blocks, *_build, *_decoder, *_dtypes, *_linear, *_rope]
