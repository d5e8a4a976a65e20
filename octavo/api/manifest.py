from octavo.core.api.manifest import *
from octavo.core.api.manifest import __all__ as __all__
