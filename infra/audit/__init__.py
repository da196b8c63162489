"""Whether a run kept its word: each row byte for byte, each group whole, each task exactly once."""

from infra.audit.books import Audit, Books
from infra.audit.run import audit_run

__all__ = ["Audit", "Books", "audit_run"]
