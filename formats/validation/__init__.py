"""Would a loader take this checkpoint? Rules on files, config and headers; no weights are read.

:func:`qtool.formats.validation.validate.validate` runs them all.
"""
