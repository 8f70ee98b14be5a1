"""``burnish train``: options -> plan -> rows -> loop -> model.

Errors in options, data or model are reported before anything is written. The trained model is written to
``output_dir``. Begin with ``plan/plan.py``, then ``prepare.py``, then ``build.py``.
"""
