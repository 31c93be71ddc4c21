"""A request and a catalog become ranked placements with price, time, memory and risk; pure."""
