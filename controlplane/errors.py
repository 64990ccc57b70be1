"""The tree of the errors that the control plane raises.

ControlPlaneError
├── Infeasible        no answer exists within the limits; the message says what would have to give.
├── ProfileMissing    no measured or composed profile for what was asked.
├── BadInput          a value from outside is wrong: where, which field, what was expected.
└── IllegalStep       a protocol was asked for a transition its table does not list.
"""


class ControlPlaneError(Exception):
    """The base of all errors; it is never raised itself."""


class Infeasible(ControlPlaneError):
    """No answer within the limits; not a fault of the input's form."""


class ProfileMissing(ControlPlaneError):
    """No profile for this model on this hardware."""


class BadInput(ControlPlaneError):
    """Input that cannot be used. The message is one line: where, field, value, what was expected."""


class IllegalStep(ControlPlaneError):
    """A state machine met an event its table does not list."""
