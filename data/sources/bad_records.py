"""Records that cannot be read: said one by one, and left out as long as there are no more than the config allows."""

import threading

from ...mesh.errors import UserError
from ...mesh.processes import tell


class BadRecords:
    """The records of one source that were left out.

    Args:
        limit: `data.bad_records`: how many may be left out; 0: the first one is an error.
        error_class: What is raised where there are more.
    """

    def __init__(self, limit: int, error_class: type[UserError] = UserError) -> None:
        self._limit, self._error_class = limit, error_class
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self.count = 0

    def leave_out(self, where: str, reason: str, records: int = 1) -> None:
        """Counts records that cannot be read, and says so; those that were told of before are not counted again.

        Args:
            where: File, and record, line or offset in it.
            reason: Why they cannot be read, and what to do.
            records: How many records these are.

        Raises:
            UserError: of `error_class`; there are more than the limit allows.
        """
        with self._lock:
            if where in self._seen:
                return
            self._seen.add(where)
            self.count += records
            count = self.count
        if not self._limit:
            raise self._error_class(f"{where}: {reason}")
        told = f"{count:,} bad record{'s' if count > 1 else ''} so far, data.bad_records={self._limit:,}"
        if count > self._limit:
            raise self._error_class(
                f"{where}: {reason} That makes {told}. Mend the data, or raise data.bad_records to leave out more."
            )
        tell(f"data: left out {where}: {reason} ({told})")

    def described(self) -> str:
        """What was left out, for descriptions: "" or ", 3 bad records left out"."""
        return f", {self.count:,} bad record{'s' if self.count > 1 else ''} left out" if self.count else ""
