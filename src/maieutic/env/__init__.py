"""What an episode is: student, gates, post-test, reward and `play()`."""
