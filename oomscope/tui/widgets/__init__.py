"""Line-API widgets: timeline, rank table, bars, flowchart."""
