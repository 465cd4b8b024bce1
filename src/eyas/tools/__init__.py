"""Tools: what a target calls, what its tools gave, and how both are written for the template.

Invariant: how calls are written and read was seen in what the template renders, and a reader is
used only where it reads back calls that the template itself wrote.
"""
