"""Average of the weights over time: the share of each update's weights in it."""

from rudra.job.tables.weights_average import WeightsAverageTable


class WeightsAverage:
    """Number of updates in the average of an owner's weights.

    The first update begins the average with its weights, as `torch.optim.swa_utils.AveragedModel` does. A uniform
    average begins again after each window.

    Args:
        table: rate or window of the average.
        count: number of updates in the average so far.

    Attributes:
        count: number of updates in the average. 0: the next update begins a new average.
    """

    def __init__(self, table: WeightsAverageTable, count: int) -> None:
        self._rate, self._period, self.count = table.rate, table.period, count

    def enter(self) -> float:
        """Enters an update. Returns the weight of its weights in the average."""
        self.count += 1
        return 1 / self.count if self._rate is None or self.count == 1 else self._rate

    def end_window(self, updates: tuple[int, int], epochs: tuple[int, int]) -> None:
        """Ends the window if it is complete.

        Args:
            updates: number of updates before the last update, and after it.
            epochs: number of complete epochs before the last update, and after it.
        """
        if self._period is not None:
            length, unit = self._period
            before, now = updates if unit == "update" else epochs
            if now // length > before // length:
                self.count = 0
