"""What a network has learned, written in another adapter's form: learn wide, store narrow."""

from spalier.refitting.refit import Refitted, refit_

__all__ = ["Refitted", "refit_"]
