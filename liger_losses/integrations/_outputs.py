"""The classes of transformers that answers of fused models derive from."""

from __future__ import annotations

from typing import Any

from liger_losses._extras import require

ModelOutput: Any = require("transformers.utils", "trl").ModelOutput
BaseModelOutputWithPast: Any = require("transformers.modeling_outputs", "trl").BaseModelOutputWithPast
