"""Who is who between hosts: certificates of a job's ranks, and the handshakes that show them."""
