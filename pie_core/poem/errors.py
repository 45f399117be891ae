"""The error of the model language."""


class PoemError(Exception):
    """A model file asks for something that its checkpoint or the kernels do not give; the message names it."""
