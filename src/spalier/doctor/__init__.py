"""What is installed and what works here, by trying it."""

from spalier.doctor.examination import Entry, Examination, examine

__all__ = ["Entry", "Examination", "examine"]
