"""What the products of every backend must do on a GPU; a backend's tests name its kernel, tilings and sizes."""
