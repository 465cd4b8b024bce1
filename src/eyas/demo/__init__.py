"""The embedded target: a tiny model that reasons, the problems it solves, and its server.

Importing this package loads nothing heavy; each module says what it needs.
"""
