"""What everything speaks: events, messages, records, the state of a training."""
