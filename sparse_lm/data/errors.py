"""The error of data that cannot be used."""


class DataError(ValueError):
    """Refuses text, a tokenizer or prepared data. The message, one line, names the file and the reason."""
