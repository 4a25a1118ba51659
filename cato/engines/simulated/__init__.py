"""An engine that computes nothing: a profile's timings, and text that is a function of the prompt.

The next token is a hash of the seed and all text before it, prompt and answer alike. So an answer
continued elsewhere, from the prompt plus the text already sent, goes on exactly as it would have
here. A test can recompute any answer and detect a lost, doubled or swapped token.
"""

from cato.engines.simulated.batch import DEFAULT_BATCHED_TOKENS
from cato.engines.simulated.engine import SimulatedEngine
from cato.engines.simulated.text import (
    PromptStart,
    simulated_seed,
    simulated_text,
    simulated_tokens,
)

__all__ = [
    "DEFAULT_BATCHED_TOKENS",
    "PromptStart",
    "SimulatedEngine",
    "simulated_seed",
    "simulated_text",
    "simulated_tokens",
]
