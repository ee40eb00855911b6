"""The one form of `ahead_of_time_forms` that nothing is wrong with."""

from ahead_of_time_forms import plain


def specialisations():
    return [plain()]
