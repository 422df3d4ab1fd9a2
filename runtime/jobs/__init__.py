"""Jobs: a file of prompts to a file of results, safe to stop at any moment."""
