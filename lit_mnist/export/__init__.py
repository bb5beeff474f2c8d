"""`lit-mnist export`: a trained network as a file for other programs, compared with the network before it is kept."""
