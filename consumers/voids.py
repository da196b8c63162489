"""How many transactions in a row came to nothing, and when that is no chance any more. Pure."""

from dataclasses import dataclass, field

from schemas.errors import TransactionsFail

MANY, FOR_S = 10, 15.0  # a rebalance costs one or two, and a broker's restart a few
REST_S = 0.02  # after the first, doubled each time
LONGEST_REST_S = 2.0


@dataclass
class Voids:
    """`topics`: what the transactions write to, for the message."""

    topics: str
    _reasons: list[str] = field(default_factory=list)
    _first_s: float = 0.0

    def count(self, reason: str, now_s: float) -> float:
        """Seconds to rest before the next try. `now_s` is monotonic. Raises TransactionsFail."""
        if not self._reasons:
            self._first_s = now_s
        self._reasons.append(reason)
        count, lasting_s = len(self._reasons), now_s - self._first_s
        if count >= MANY and lasting_s >= FOR_S:
            raise TransactionsFail(
                f"{count} transactions in a row came to nothing within {lasting_s:.0f} s, the "
                f"first: {self._reasons[0]}; the last: {reason}; look at the limits and the "
                f"permissions of {self.topics}; nothing is lost: the next start goes on at the "
                "last commit"
            )
        return float(min(LONGEST_REST_S, REST_S * 2 ** min(count, 10)))

    def end(self) -> None:
        """One was committed."""
        self._reasons.clear()
