"""What a run will do, before it starts: as text and as JSON."""
