"""The command `liger-losses`: `plan`, `bench`, `doctor`, `demo`.

Parsing, `doctor` and every `--json` need torch alone. Tables and progress bars are rich's and charts matplotlib's: the
extra `cli`. Nothing else in the library imports this package.
"""
