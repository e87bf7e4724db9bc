"""From the runs of a sweep to what may be said about it: records, arms, trends, contrasts, verdicts."""
