import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # tests here share `user_code`, and so do the ranks that they start
