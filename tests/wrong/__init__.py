"""Deliberately wrong implementations: the judge is judged by whether it catches them.

`right.RIGHT` is a right implementation in plain torch that shares nothing with
`jagbench.reference`. Every wrong one is that with one step exchanged (`dataclasses.replace`), and
is named as `--impl=wrong.masks:off_by_one`, with the parent of this package on the path.
`faults.FAULTS` says which test of the suite must catch which.
"""
