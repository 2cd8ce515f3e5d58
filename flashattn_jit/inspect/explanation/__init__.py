"""What a call or a plan does, as text and pictures: explain and plot."""
