"""Sixteen everyday questions for a small general chat model, written for this project.

They are our own words and come from no data set. Every one can be answered in a few sentences.
"""

from __future__ import annotations

CHAT_PROMPTS: tuple[str, ...] = (
    "What is 2+2?",
    "What is the capital of France, and which river runs through it?",
    "My bread dough hardly rose overnight. What could have gone wrong?",
    "Explain to a ten-year-old why the sky turns red in the evening.",
    "I have eggs, rice and half a cabbage. What can I cook tonight?",
    "Write a short, polite note to a neighbour whose dog barks at night.",
    "What should I check before I buy a used bicycle?",
    "Give me three ideas for a rainy afternoon with two small children.",
    "How do I get candle wax out of a wool tablecloth?",
    "What is the difference between weather and climate?",
    "Write a four-line poem about the first frost of the year.",
    "I start a new job on Monday and I am nervous. Any advice?",
    "Write a Python function that counts the vowels in a word.",
    "Why do cats knead blankets with their paws?",
    "Suggest a name and a one-sentence motto for a small repair shop.",
    "Tell me a very short story about a lighthouse keeper who collects clocks.",
)
