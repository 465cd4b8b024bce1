"""Text to ids and back, by the model's own files. Knows no server.

Invariant: ids are joined, never text; nothing here adds a token that the chat template did
not write.
"""

from eyas.tokens.chat_template import ChatTemplate
from eyas.tokens.loading import load_tokenizer
from eyas.tokens.markers import Marker
from eyas.tokens.profile import Profile, Reading, build_profile
from eyas.tokens.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Marker",
    "Profile",
    "Reading",
    "Tokenizer",
    "build_profile",
    "load_tokenizer",
]
