"""What "the same answer" means: tolerances, comparison and the cases they run on."""
