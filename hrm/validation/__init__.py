"""A plan validated on the machine at hand: policies chosen, predicted, measured in turn, judged. No torch here."""
