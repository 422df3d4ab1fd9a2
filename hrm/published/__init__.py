"""Measurements that were published, and how close predictions come to them: rows, policies, Eq. 12, scores, report."""
