"""Gradient-boosted trees with XGBoost, trained on the breast cancer data of scikit-learn (569
tumours with 30 features each).

    python train.py --rounds 200

Training stops when 20 more trees bring no improvement. The program saves the newest model as a
checkpoint and resumes from it.
"""

import argparse
import os
import shutil
from pathlib import Path

import xgboost
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))


class Keep(xgboost.callback.TrainingCallback):
    """Save the model after every ten trees. The file has a temporary name until it is complete."""

    def after_iteration(self, model, epoch, evals_log) -> bool:
        if epoch % 10 == 9:
            model.save_model(FOLDER / "half.json")
            (FOLDER / "half.json").replace(FOLDER / "model.json")
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)

    table = load_breast_cancer()
    rows, test_rows, labels, test_labels = train_test_split(
        table.data, table.target, test_size=0.25, random_state=0, stratify=table.target
    )
    names = [str(name) for name in table.feature_names]
    known = xgboost.DMatrix(rows, labels, feature_names=names)
    test = xgboost.DMatrix(test_rows, test_labels, feature_names=names)
    before = FOLDER / "model.json"
    done = 0
    if before.exists():
        done = xgboost.Booster(model_file=before).num_boosted_rounds()
        print(f"continuing after {done} trees")
    model = xgboost.train(
        {
            "objective": "binary:logistic",
            "eval_metric": "logloss",
            "max_depth": options.depth,
            "eta": options.lr,
            "subsample": 0.8,
            "device": "cuda"
            if shutil.which("nvidia-smi") and os.environ.get("CUDA_VISIBLE_DEVICES", "all")
            else "cpu",
        },
        known,
        num_boost_round=max(options.rounds - done, 0),
        evals=[(test, "test")],
        early_stopping_rounds=20,
        verbose_eval=50,
        xgb_model=before if done else None,
        callbacks=[Keep()],
    )
    right = float(((model.predict(test) > 0.5) == test_labels).mean())
    print(
        f"accuracy {right:.4f} on {len(test_labels)} held-out tumours, "
        f"{model.num_boosted_rounds()} trees"
    )
    weights = model.get_score(importance_type="gain")
    print(
        "what counts most: " + ", ".join(sorted(weights, key=weights.__getitem__, reverse=True)[:3])
    )


if __name__ == "__main__":
    main()
