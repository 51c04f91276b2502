"""The simulation driver, which runs roles in virtual time, and its parts."""
