"""``kvrack bench``: caches side by side on one model and one machine, kvrack's and transformers' own.

`command` is the command; `run` goes through the contexts and `measure` through one of them, with what
`entries` and `theirs` build; `results` is what is written, and `table`, `plots`, `page` and `compare` show it.
"""
