"""Measuring for `hrm validate run`: candidates run with real tensors, in turn."""
