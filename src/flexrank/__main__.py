"""`python -m flexrank`, the same as the command `flexrank`."""

from flexrank.cli import main

if __name__ == "__main__":
    main()
