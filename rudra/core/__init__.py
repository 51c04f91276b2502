"""Language of the whole system: events, messages, records, and the state of a training."""
