"""``gptq_v2``: as ``gptq``, with zero points stored as they are."""

from quantforge.checkpoint.gptq import Gptq

FORMAT = Gptq("gptq_v2", zero_offset=0)
