"""What training programs print becomes values; what only looks so does not."""

import math
from math import inf

import pytest

from cavvy.agent.work import printed_values
from cavvy.agent.work.printed_values import PrintedValues

# Lines as the named program or tutorial prints them, and the step and values that people would plot.
LOGS: dict[str, tuple[str, list[tuple[float | None, dict[str, float]]]]] = {
    "ours": (
        "step 12 loss=0.71 acc=0.83\nstep 13 loss=0.70 acc=0.84\n",
        [(12.0, {"loss": 0.71, "acc": 0.83}), (13.0, {"loss": 0.7, "acc": 0.84})],
    ),
    "trainer": (
        "{'loss': 0.7131, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 1.2}\n"
        "{'eval_loss': 0.5, 'eval_runtime': 3.2, 'eval_samples_per_second': 31.2, 'epoch': 2.0}\n",
        [
            (1.2, {"loss": 0.7131, "grad_norm": 1.25, "learning_rate": 5e-05}),
            (2.0, {"eval_loss": 0.5}),
        ],
    ),
    "mnist": (
        "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.301234\n"
        "\n"
        "Test set: Average loss: 0.0434, Accuracy: 9857/10000 (99%)\n",
        [
            (60640.0, {"loss": 2.301234}),
            (60640.0, {"test_average_loss": 0.0434, "test_accuracy": 0.9857}),
        ],
    ),
    "tutorial": (
        "Epoch [1/5], Step [100/600], Loss: 2.2345\nEpoch [2/5], Step [100/600], Loss: 1.2345\n",
        [(700.0, {"loss": 2.2345}), (1300.0, {"loss": 1.2345})],
    ),
    "nanogpt": (
        "step 0: train loss 4.2874, val loss 4.2823\n"
        "iter 0: loss 4.2654, time 423.15ms, mfu -100.00%\n"
        "iter 10: loss 3.1, time 33.1ms, mfu 12.3%\n",
        [
            (0.0, {"train_loss": 4.2874, "val_loss": 4.2823}),
            (0.0, {"loss": 4.2654, "mfu": -100.0}),
            (10.0, {"loss": 3.1, "mfu": 12.3}),
        ],
    ),
    "imagenet": (
        "Epoch: [0][  10/5005]\tTime  0.144 ( 1.02)\tData  0.000 ( 0.61)\tLoss 6.9876e+00 (7.0123e+00)\tAcc@1   0.00 (  0.07)\tAcc@5   0.39 (  0.50)\n",
        [(10.0, {"loss": 6.9876, "acc@1": 0.0, "acc@5": 0.39})],
    ),
    "wordlm": (
        "| epoch   1 |   200/ 2928 batches | lr 20.00 | ms/batch 12.31 | loss  7.63 | ppl  2064.41\n",
        [(3128.0, {"lr": 20.0, "loss": 7.63, "ppl": 2064.41})],
    ),
    "tqdm": (
        "Epoch 3:  45%|####5     | 45/100 [00:12<00:15,  3.61it/s, loss=0.71, v_num=0]\rEpoch 3:  46%|####6     | 46/100 [00:12<00:15,  3.61it/s, loss=0.70, v_num=0]\r",
        [(345.0, {"loss": 0.71}), (346.0, {"loss": 0.7})],
    ),
    "keras": (
        "Epoch 1/10\n"
        "\x1b[1m 12/938\x1b[0m \x1b[37m━━━━\x1b[0m \x1b[1m2s\x1b[0m 3ms/step - accuracy: 0.3120 - loss: 2.1021\x1b[8D\r938/938 ━━━━ 4s 3ms/step - accuracy: 0.91 - loss: 0.31 - val_accuracy: 0.95 - val_loss: 0.2\n",
        [
            (950.0, {"accuracy": 0.312, "loss": 2.1021}),
            (1876.0, {"accuracy": 0.91, "loss": 0.31, "val_accuracy": 0.95, "val_loss": 0.2}),
        ],
    ),
    "detectron": (
        "[06/08 10:11:12 d2.utils.events]:  eta: 0:12:34  iter: 19  total_loss: 2.31  loss_cls: 0.54  loss_box_reg: 0.12  time: 0.4501  data_time: 0.0123  lr: 0.00019  max_mem: 2000M\n",
        [(19.0, {"total_loss": 2.31, "loss_cls": 0.54, "loss_box_reg": 0.12, "lr": 0.00019})],
    ),
    "fairseq": (
        "2023-01-01 10:00:00 | INFO | train_inner | epoch 001:    100 / 1000 loss=13.2, nll_loss=12.9, ppl=7600.1, wps=31234.5, ups=5.1, lr=1.2e-05, gnorm=3.2\n"
        '2023-01-01 10:00:00 | INFO | train | {"epoch": 1, "train_loss": "5.31", "train_ppl": "39.9", "train_lr": "0.0005"}\n',
        [
            (
                1100.0,
                {
                    "loss": 13.2,
                    "nll_loss": 12.9,
                    "ppl": 7600.1,
                    "wps": 31234.5,
                    "ups": 5.1,
                    "lr": 1.2e-05,
                    "gnorm": 3.2,
                },
            ),
            (1.0, {"train_loss": 5.31, "train_ppl": 39.9, "train_lr": 0.0005}),
        ],
    ),
    "megatron": (
        " iteration      100/  500000 | consumed samples:        51200 | elapsed time per iteration (ms): 300.1 | learning rate: 1.500E-04 | global batch size:   512 | lm loss: 7.123456E+00 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |\n",
        [
            (
                100.0,
                {
                    "learning_rate": 0.00015,
                    "lm_loss": 7.123456,
                    "loss_scale": 1.0,
                    "grad_norm": 1.234,
                },
            )
        ],
    ),
    "deepspeed": (
        "[2023-05-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]\n",
        [(10.0, {"lr": 0.001})],
    ),
    "xgboost": (
        "[0]\ttrain-rmse:0.48123\tvalid-rmse:0.50123\n[1]\ttrain-rmse:0.41\tvalid-rmse:0.45\n",
        [
            (0.0, {"train-rmse": 0.48123, "valid-rmse": 0.50123}),
            (1.0, {"train-rmse": 0.41, "valid-rmse": 0.45}),
        ],
    ),
    "lightgbm": (
        "[10]\tvalid_0's binary_logloss: 0.612\tvalid_0's auc: 0.81\n",
        [(10.0, {"valid_0_binary_logloss": 0.612, "valid_0_auc": 0.81})],
    ),
    "catboost": (
        "0:\tlearn: 0.6431\ttest: 0.6512\tbest: 0.6512 (0)\ttotal: 52.3ms\tremaining: 52.2s\n",
        [(0.0, {"learn": 0.6431})],
    ),
    "sb3": (
        "---------------------------------\n"
        "| rollout/           |          |\n"
        "|    ep_len_mean     | 22.1     |\n"
        "|    ep_rew_mean     | 22.1     |\n"
        "| time/              |          |\n"
        "|    fps             | 1021     |\n"
        "|    iterations      | 1        |\n"
        "|    time_elapsed    | 2        |\n"
        "|    total_timesteps | 2048     |\n"
        "---------------------------------\n",
        [(2048.0, {"rollout/ep_len_mean": 22.1, "rollout/ep_rew_mean": 22.1, "time/fps": 1021.0})],
    ),
    "sklearn": (
        "Iteration 1, loss = 0.69314718\nIteration 2, loss = 0.5\n",
        [(1.0, {"loss": 0.69314718}), (2.0, {"loss": 0.5})],
    ),
    "torchtitan": (
        "\x1b[32m[titan] 2025-01-01 10:00:00,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2343  \x1b[38;2;180;60;0mgrad_norm:  4.1  \x1b[33mmemory:  9.03GiB(9.5%)  \x1b[34mtps: 1,234  \x1b[36mtflops: 12.3  \x1b[35mmfu: 3.94%\x1b[39m\n",
        [(1.0, {"loss": 12.2343, "grad_norm": 4.1, "tps": 1234.0, "tflops": 12.3, "mfu": 3.94})],
    ),
    "flax": (
        "train epoch: 1, loss: 0.2134, accuracy: 93.21\n"
        "eval epoch: 1, loss: 0.05, accuracy: 98.21\n",
        [
            (1.0, {"loss": 0.2134, "accuracy": 93.21}),
            (1.0, {"eval_loss": 0.05, "eval_accuracy": 98.21}),
        ],
    ),
    "mmengine": (
        "06/08 10:11:12 - mmengine - INFO - Epoch(train) [1][ 50/391]  lr: 1.0000e-02  eta: 0:01:23  time: 0.1021  data_time: 0.0123  memory: 500  loss: 1.2345\n",
        [(441.0, {"lr": 0.01, "loss": 1.2345})],
    ),
    "fastai": (
        "epoch     train_loss  valid_loss  accuracy  time    \n"
        "0         0.512345    0.412345    0.912345  00:12     \n"
        "1         0.412345    0.312345    0.932345  00:12     \n",
        [
            (0.0, {"train_loss": 0.512345, "valid_loss": 0.412345, "accuracy": 0.912345}),
            (1.0, {"train_loss": 0.412345, "valid_loss": 0.312345, "accuracy": 0.932345}),
        ],
    ),
    "spacy": (
        "E    #       LOSS TOK2VEC  LOSS NER  ENTS_F  ENTS_P  ENTS_R  SCORE \n"
        "---  ------  ------------  --------  ------  ------  ------  ------\n"
        "  0       0          0.00     45.68    0.00    0.00    0.00    0.00\n"
        "  1     200         12.10    845.68   70.00   71.00   69.00    0.70\n",
        [
            (0.0, {"loss_tok2vec": 0.0, "loss_ner": 45.68, "score": 0.0}),
            (
                200.0,
                {
                    "loss_tok2vec": 12.1,
                    "loss_ner": 845.68,
                    "ents_f": 70.0,
                    "ents_p": 71.0,
                    "ents_r": 69.0,
                    "score": 0.7,
                },
            ),
        ],
    ),
    "yolo": (
        "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
        "      1/100      2.34G      1.234       3.45        1.2         45        640: 100%|██████████| 8/8 [00:03<00:00,  2.1it/s]\n"
        "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100%|█████| 4/4 [00:01<00:00]\n"
        "                   all        128        929      0.612      0.512      0.555      0.412\n",
        [
            (1.0, {"box_loss": 1.234, "cls_loss": 3.45, "dfl_loss": 1.2}),
            (8.0, {"map50": 0.555, "map50-95": 0.412}),
        ],
    ),
    "plain": (
        "Epoch 1: train loss = 0.5, val loss = 0.6, val acc = 81.2%\n",
        [(1.0, {"train_loss": 0.5, "val_loss": 0.6, "val_acc": 81.2})],
    ),
    "rank": (
        "[rank0]: step 3 loss 0.5\n[default0]:step 4 loss 0.4\n",
        [(3.0, {"loss": 0.5}), (4.0, {"loss": 0.4})],
    ),
    "json": (
        '{"step": 10, "loss": 0.5, "tokens": 1024, "lr": 1e-4}\n'
        '{"step": 20, "loss": 0.4, "tokens": 2048, "lr": 1e-4}\n',
        [
            (10.0, {"loss": 0.5, "lr": 0.0001}),
            (20.0, {"loss": 0.4, "tokens": 2048.0, "lr": 0.0001}),
        ],
    ),
    "local": (
        "epoch 1 batch 0 loss 1.0\n"
        "epoch 1 batch 50 loss 0.9\n"
        "epoch 2 batch 0 loss 0.8\n"
        "epoch 2 batch 50 loss 0.7\n",
        [
            (0.0, {"loss": 1.0}),
            (50.0, {"loss": 0.9}),
            (51.0, {"loss": 0.8}),
            (101.0, {"loss": 0.7}),
        ],
    ),
    "rl": (
        "Episode 10\tLast reward: 22.00\tAverage reward: 18.31\n",
        [(10.0, {"last_reward": 22.0, "average_reward": 18.31})],
    ),
    "ppo": (
        "global_step=1024, episodic_return=[23.]\n"
        "global_step=2048, episodic_return=31.0\n"
        "SPS: 1234\n",
        [(1024.0, {"episodic_return": 23.0}), (2048.0, {"episodic_return": 31.0})],
    ),
    "gan": (
        "[0/5][50/1583]\tLoss_D: 0.3345\tLoss_G: 23.4512\tD(x): 0.9512\tD(G(z)): 0.0012 / 0.0000\n",
        [(50.0, {"loss_d": 0.3345, "loss_g": 23.4512})],
    ),
    "hf_tqdm": (
        "  3%|▎         | 12/375 [00:05<02:31,  2.40it/s]\r{'loss': 0.6, 'learning_rate': 4.8e-05, 'epoch': 0.1}\n",
        [(0.1, {"loss": 0.6, "learning_rate": 4.8e-05})],
    ),
    "lightning2": (
        "Epoch 0: 100%|####| 10/10 [00:00<00:00, 55.2it/s, v_num=3, train_loss_step=0.512, train_loss_epoch=0.612, val_acc=0.912]\n",
        [(10.0, {"train_loss_step": 0.512, "train_loss_epoch": 0.612, "val_acc": 0.912})],
    ),
    "accelerate": (
        "epoch 0: {'accuracy': 0.8455882352941176, 'f1': 0.8918}\n"
        "epoch 1: {'accuracy': 0.86, 'f1': 0.9}\n",
        [
            (0.0, {"accuracy": 0.8455882352941176, "f1": 0.8918}),
            (1.0, {"accuracy": 0.86, "f1": 0.9}),
        ],
    ),
    "timm": (
        "Train: 0 [ 100/1251 (  8%)]  Loss: 6.92 (6.93)  Time: 0.512s,  500.12/s  (0.6s, 400.1/s)  LR: 1.000e-05  Data: 0.012 (0.02)\n"
        "Test: [  48/48]  Time: 0.1 (0.2)  Loss:   1.23 ( 1.34)  Acc@1:  72.1 ( 71.2)  Acc@5:  91.2 ( 90.1)\n",
        [
            (100.0, {"loss": 6.92, "lr": 1e-05}),
            (100.0, {"test_loss": 1.23, "test_acc@1": 72.1, "test_acc@5": 91.2}),
        ],
    ),
    "timm2": (
        "Train: 1 [ 100/1251 (  8%)]  Loss: 6.02 (6.93)\n",
        [(1351.0, {"loss": 6.02})],
    ),
    "openclip": (
        "2023-01-01,10:00:00 | INFO | Train Epoch: 0 [  6400/10000 (64%)] Data (t): 0.1 Batch (t): 0.5, 123.4/s LR: 0.000012 Logit Scale: 14.2 Contrastive_loss: 4.15 (4.2) Loss: 4.15 (4.2)\n",
        [(6400.0, {"lr": 1.2e-05, "contrastive_loss": 4.15, "loss": 4.15})],
    ),
    "litgpt": (
        "Epoch 1 | iter 10 step 2 | loss train: 2.302, val: n/a | iter time: 320.12 ms\n"
        "Epoch 1 | iter 20 step 4 | loss train: 2.102, val: 2.01 | iter time: 320.12 ms (step)\n",
        [(2.0, {"loss_train": 2.302}), (4.0, {"loss_train": 2.102})],
    ),
    "nemo": (
        "Epoch 0: :   1%|1| 100/10000 [01:00<1:39:00, v_num=0, reduced_train_loss=5.12, global_step=99.0, consumed_samples=800.0, train_step_timing in s=0.5]\n",
        [(99.0, {"reduced_train_loss": 5.12})],
    ),
    "jax": (
        "I0101 10:00:00.123456 140 logging_writer.py:48] [100] loss=2.31, learning_rate=0.001, steps_per_sec=12.3\n",
        [(100.0, {"loss": 2.31, "learning_rate": 0.001})],
    ),
    "paddle": (
        "global step 100, epoch: 1, batch: 99, loss: 0.512, acc: 0.81, speed: 3.12 step/s\n",
        [(100.0, {"loss": 0.512, "acc": 0.81, "speed": 3.12})],
    ),
    "mmcls": (
        "2023-01-01 10:00:00,123 - mmcls - INFO - Epoch [1][100/500]\tlr: 1.000e-01, eta: 10:20:30, time: 0.5, data_time: 0.1, memory: 5000, loss: 6.5\n",
        [(600.0, {"lr": 0.1, "loss": 6.5})],
    ),
    "espnet": (
        "[host] 2023-01-01 10:00:00,123 (trainer:737) INFO: 1epoch:train:1-100batch: iter_time=0.1, forward_time=0.2, loss=100.2, acc=0.2, optim0_lr0=1.0e-05\n",
        [(None, {"loss": 100.2, "acc": 0.2, "optim0_lr0": 1e-05})],
    ),
    "whisper": (
        "step 100: WER = 12.3%, loss = 0.3\n",
        [(100.0, {"wer": 12.3, "loss": 0.3})],
    ),
    "rllib": (
        "iter: 1 reward_mean: 21.3 episode_len_mean: 22\n",
        [(1.0, {"reward_mean": 21.3})],
    ),
    "dqn": (
        "episode: 10/1000, score: 23, e: 0.95\n",
        [(10.0, {"score": 23.0})],
    ),
    "cleanrl": (
        "global_step=230, episodic_return=[12.], episodic_length=[12]\n",
        [(230.0, {"episodic_return": 12.0})],
    ),
    "unsloth": (
        " [60/60 07:26, Epoch 0/1]\nStep\tTraining Loss\n1\t1.8237\n2\t2.2911\n",
        [(1.0, {"training_loss": 1.8237}), (2.0, {"training_loss": 2.2911})],
    ),
    "trlppo": (
        "{'loss': 0.69, 'rewards/chosen': 0.01, 'rewards/rejected': -0.02, 'rewards/accuracies': 0.5, 'logps/chosen': -120.3, 'epoch': 0.05}\n",
        [
            (
                0.05,
                {
                    "loss": 0.69,
                    "rewards/chosen": 0.01,
                    "rewards/rejected": -0.02,
                    "rewards/accuracies": 0.5,
                },
            )
        ],
    ),
    "keras_epochs": (
        "Epoch 2/3\n - 1s - loss: 0.2 - accuracy: 0.93 - val_loss: 0.25 - val_accuracy: 0.92\n",
        [(2.0, {"loss": 0.2, "accuracy": 0.93, "val_loss": 0.25, "val_accuracy": 0.92})],
    ),
    "torchrl": (
        "reward: 4.5 (init= 3.2), last reward: 4.6\n",
        [(None, {"reward": 4.5, "last_reward": 4.6})],
    ),
    "fast": (
        "Epoch: 001/010 | Batch 0000/0938 | Cost: 2.3041 | Loss: 2.30\n",
        [(938.0, {"cost": 2.3041, "loss": 2.3})],
    ),
    "percent": (
        "Epoch 5 | Train Acc: 93.21% | Test Acc: 90.1%\n",
        [(5.0, {"train_acc": 93.21, "test_acc": 90.1})],
    ),
    "arrow": (
        "epoch 3 -> loss: 0.31\n>>> [Epoch 4] loss=0.2\n",
        [(3.0, {"loss": 0.31}), (4.0, {"loss": 0.2})],
    ),
    "colon": (
        "Epoch:5,Loss:0.234,Val Loss:0.345\n",
        [(5.0, {"loss": 0.234, "val_loss": 0.345})],
    ),
    "tabs": (
        "10\tloss\t0.5\n",
        [(None, {"loss": 0.5})],
    ),
    "loss only": (
        "Loss: 0.5\nLoss: 0.4\n0.3\n",
        [(None, {"loss": 0.5}), (None, {"loss": 0.4})],
    ),
    "csv": (
        "step,loss,acc\n1,0.5,0.8\n2,0.4,0.9\n",
        [(1.0, {"loss": 0.5, "acc": 0.8}), (2.0, {"loss": 0.4, "acc": 0.9})],
    ),
    "logged": (
        "INFO:root:step=3 train/loss=0.5 val/acc=0.8\n"
        "INFO:__main__:Step 4: loss 0.5\n"
        "2026-01-01T10:00:00Z INFO train step=5 loss=0.4\n",
        [(3.0, {"train/loss": 0.5, "val/acc": 0.8}), (4.0, {"loss": 0.5}), (5.0, {"loss": 0.4})],
    ),
    "metrics=": (
        "metrics: loss=0.5 lr=1e-3\n",
        [(None, {"loss": 0.5, "lr": 0.001})],
    ),
    "spaces": (
        "Step   100 | Loss   2.3451 | Grad   1.234 | LR 3.0e-04 | Tokens/s 12345\n",
        [(100.0, {"loss": 2.3451, "lr": 0.0003})],
    ),
    "llmc": (
        "step    1/74 | loss 10.971 (+0.00z)| norm 15.2 (+0.1z)| lr 8.57e-07 | 370.1 ms | 45.1% bf16 MFU | 1234567 tok/s\n",
        [(1.0, {"loss": 10.971, "norm": 15.2, "lr": 8.57e-07})],
    ),
    "svm": (
        "epoch=1 train_err=0.12 test_err=0.14\n",
        [(1.0, {"train_err": 0.12, "test_err": 0.14})],
    ),
    "inf": (
        "step 3 loss=inf\nstep 4 loss: -Infinity\nstep 5 loss=0.2\n",
        [(3.0, {"loss": inf}), (4.0, {"loss": -inf}), (5.0, {"loss": 0.2})],
    ),
    "neg": (
        "step 3 elbo=-123.4 reward: -1.5\n",
        [(3.0, {"elbo": -123.4, "reward": -1.5})],
    ),
    "sci": (
        "step 3 loss=1.2E-03\n",
        [(3.0, {"loss": 0.0012})],
    ),
    "evaluate": (
        "Evaluation: loss = 0.3, accuracy = 0.9\n"
        "Final test accuracy: 0.93\n"
        "Best val loss: 0.1 at epoch 7\n",
        [
            (None, {"eval_loss": 0.3, "eval_accuracy": 0.9}),
            (None, {"final_test_accuracy": 0.93}),
            (7.0, {"best_val_loss": 0.1}),
        ],
    ),
    "keras_gan": (
        "12 [D loss: 0.512300, acc.: 51.20%] [G loss: 0.912300]\n"
        "13 [D loss: 0.51, acc.: 52.20%] [G loss: 0.91]\n",
        [
            (12.0, {"d_loss": 0.5123, "acc": 51.2, "g_loss": 0.9123}),
            (13.0, {"d_loss": 0.51, "acc": 52.2, "g_loss": 0.91}),
        ],
    ),
    "macro_f1": (
        "[epoch 3] train loss=0.4123  val macro-F1=0.9100  (1.2 min)\n",
        [(3.0, {"train_loss": 0.4123, "val_macro-f1": 0.91})],
    ),
    "nanochat": (
        "step 00010/21400 (0.05%) | loss: 10.123456 | lrm: 1.00 | dt: 1234.56ms | tok/sec: 424,123 | mfu: 48.10 | total time: 1.20m\n"
        "step 00011/21400 (0.05%) | loss: 10.12 | lrm: 1.00 | dt: 1235.56ms | tok/sec: 424,124 | mfu: 48.11 | total time: 1.21m\n"
        "Step 00250 | Validation bpb: 1.2345\n",
        [
            (10.0, {"loss": 10.123456, "mfu": 48.1}),
            (11.0, {"loss": 10.12, "tok/sec": 424124.0, "mfu": 48.11}),
            (250.0, {"validation_bpb": 1.2345}),
        ],
    ),
    "rainbow": (
        "Episode 50 | Steps: 1247 | Score: 145.0 | Total Steps: 62350 | Mean(100): 132.4 | Eval: 156.3\n"
        "Episode 100 | Steps: 1198 | Score: 180.0 | Total Steps: 125400 | Mean(100): 144.3 | Eval: 178.2\n",
        [
            (50.0, {"score": 145.0}),
            (
                100.0,
                {
                    "steps": 1198.0,
                    "score": 180.0,
                    "total_steps": 125400.0,
                    "mean": 144.3,
                    "eval": 178.2,
                },
            ),
        ],
    ),
    "episode_blocks": (
        "=====\n"
        "Episode 10/1000 (1.0% complete)\n"
        "=====\n"
        "  Game Score:         0 - 21  (Agent - Opponent)\n"
        "  Episode Length:      978 steps\n"
        "  Environment Reward:  -21.0\n"
        "  Total Reward:       -18.66\n"
        "  Avg Reward (10):    -18.45\n"
        "  Loss:              0.3452\n",
        [
            (10.0, {"environment_reward": -21.0}),
            (10.0, {"total_reward": -18.66}),
            (10.0, {"avg_reward": -18.45}),
            (10.0, {"loss": 0.3452}),
        ],
    ),
    "spinning_up": (
        "---------------------------------------\n"
        "|             Epoch |               3 |\n"
        "|      AverageEpRet |            23.5 |\n"
        "|          StdEpRet |            10.1 |\n"
        "|             EpLen |            23.5 |\n"
        "|             LossPi |         -0.0123 |\n"
        "|              Time |            12.3 |\n"
        "---------------------------------------\n",
        [
            (
                3.0,
                {
                    "AverageEpRet": 23.5,
                    "StdEpRet": 10.1,
                    "EpLen": 23.5,
                    "LossPi": -0.0123,
                    "Time": 12.3,
                },
            )
        ],
    ),
    "kohya_ascii_bar": (
        "steps:  12%|#1        | 192/1600 [02:11<16:01,  1.46it/s, avr_loss=0.0912]\r",
        [(192.0, {"avr_loss": 0.0912})],
    ),
    "mlx_lm": (
        "Iter 1: Val loss 2.456, Val took 12.3s\n"
        "Iter 10: Train loss 2.345, Learning Rate 1.000e-05, It/sec 1.234, Tokens/sec 567.890, Trained Tokens 4567, Peak mem 12.345 GB\n",
        [(1.0, {"val_loss": 2.456}), (10.0, {"train_loss": 2.345, "learning_rate": 1e-05})],
    ),
    "maxtext": (
        "completed step: 10, seconds: 1.234, TFLOP/s/device: 123.400, Tokens/s/device: 1234.500, total_weights: 8192, loss: 9.876\n"
        "completed step: 11, seconds: 1.235, TFLOP/s/device: 123.410, Tokens/s/device: 1234.600, total_weights: 8192, loss: 9.871\n",
        [
            (10.0, {"loss": 9.876}),
            (
                11.0,
                {
                    "seconds": 1.235,
                    "tflop/s/device": 123.41,
                    "tokens/s/device": 1234.6,
                    "loss": 9.871,
                },
            ),
        ],
    ),
    "caffe": (
        "I0829 10:00:00.123456  1234 solver.cpp:228] Iteration 100, loss = 0.41\n"
        "I0829 10:00:00.123456  1234 solver.cpp:244]     Train net output #0: loss = 0.41 (* 1 = 0.41 loss)\n"
        "I0829 10:00:00.123456  1234 sgd_solver.cpp:106] Iteration 100, lr = 0.01\n"
        "I0829 10:00:00.123456  1234 solver.cpp:404]     Test net output #0: accuracy = 0.9123\n",
        [
            (100.0, {"loss": 0.41}),
            (100.0, {"loss": 0.41}),
            (100.0, {"lr": 0.01}),
            (100.0, {"test_accuracy": 0.9123}),
        ],
    ),
    "pytorch_cifar": (
        " [=======>.......]  Step: 21ms | Tot: 1s234ms | Loss: 1.234 | Acc: 51.234% (1234/2408) 20/391 \r",
        [(20.0, {"loss": 1.234, "acc": 51.234})],
    ),
    "cyclegan": (
        "(epoch: 1, iters: 100, time: 0.123, data: 0.456) D_A: 0.312 G_A: 0.512 cycle_A: 1.234 idt_A: 0.512 D_B: 0.212\n"
        "(epoch: 1, iters: 200, time: 0.123, data: 0.456) D_A: 0.313 G_A: 0.513 cycle_A: 1.235 idt_A: 0.513 D_B: 0.213\n",
        [(200.0, {"d_a": 0.313, "g_a": 0.513, "cycle_a": 1.235, "idt_a": 0.513, "d_b": 0.213})],
    ),
    "rich_table": (
        "┃ Epoch ┃ Train Loss ┃ Val Loss ┃\n"
        "│ 1     │ 0.41       │ 0.43     │\n"
        "│ 2     │ 0.31       │ 0.33     │\n",
        [
            (1.0, {"train_loss": 0.41, "val_loss": 0.43}),
            (2.0, {"train_loss": 0.31, "val_loss": 0.33}),
        ],
    ),
    "lightning_test_table": (
        "┏━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┓\n"
        "┃  Test metric  ┃ DataLoader 0 ┃\n"
        "┡━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━┩\n"
        "│   test_acc    │    0.9123    │\n"
        "│   test_loss   │    0.3123    │\n"
        "└───────────────┴──────────────┘\n",
        [(None, {"test_acc": 0.9123, "test_loss": 0.3123})],
    ),
    "marian": (
        "[2026-11-30 10:00:00] Ep. 1 : Up. 1000 : Sen. 64,000 : Cost 7.12345678 * 1,234,567 @ 12,345 after 1,234,567 : Time 123.45s : 12345.67 words/s : gNorm 0.5\n",
        [(1000.0, {"cost": 7.12345678, "gnorm": 0.5})],
    ),
    "rsl_rl": (
        "################################################################################\n"
        "                       Learning iteration 12/1500                       \n"
        "\n"
        "                       Computation: 12345 steps/s (collection: 0.512s, learning 0.123s)\n"
        "               Value function loss: 0.0123\n"
        "                    Surrogate loss: -0.0012\n"
        "             Mean action noise std: 0.98\n"
        "                       Mean reward: 1.23\n"
        "               Mean episode length: 123.45\n"
        "--------------------------------------------------------------------------------\n"
        "                   Total timesteps: 1277952\n"
        "                    Iteration time: 0.64s\n",
        [
            (12.0, {"value_function_loss": 0.0123}),
            (12.0, {"surrogate_loss": -0.0012}),
            (12.0, {"mean_reward": 1.23}),
        ],
    ),
    "verl": (
        "step:1 - actor/entropy:0.41 - actor/kl_loss:0.001 - actor/pg_loss:0.01 - actor/grad_norm:0.5 - critic/score/mean:0.5 - response_length/mean:210.5 - perf/throughput:1234.5\n",
        [
            (
                1.0,
                {
                    "actor/entropy": 0.41,
                    "actor/kl_loss": 0.001,
                    "actor/pg_loss": 0.01,
                    "actor/grad_norm": 0.5,
                    "critic/score/mean": 0.5,
                    "perf/throughput": 1234.5,
                },
            )
        ],
    ),
    "opennmt": (
        "[2026-11-30 10:00:00,123 INFO] Step 50/100000; acc:   9.8; ppl: 12345.6; xent: 9.4; lr: 0.00010; sents:    1234; bsz: 1234/1234/12; 12345/12345 tok/s;     12 sec;\n",
        [(50.0, {"acc": 9.8, "ppl": 12345.6, "lr": 0.0001})],
    ),
    "icefall": (
        "2022-05-01 10:00:00,123 INFO [train.py:812] (0/4) Epoch 1, batch 50, loss[loss=0.4123, simple_loss=0.8, pruned_loss=6.1, over 1234.00 frames.], tot_loss[loss=0.5, simple_loss=0.9, pruned_loss=6.2, over 12345.1 frames.], batch size: 12, lr: 3.00e-03\n",
        [(50.0, {"loss": 0.4123, "simple_loss": 0.8, "pruned_loss": 6.1, "lr": 0.003})],
    ),
    "detr": (
        "Epoch: [0]  [  10/1000]  eta: 0:12:34  lr: 0.000100  class_error: 90.12  loss: 34.1234 (36.1234)  loss_ce: 5.1000 (5.2000)  time: 0.1234  data: 0.0012  max mem: 1234\n"
        "Averaged stats: lr: 0.000100  class_error: 80.00  loss: 30.0000 (31.0000)\n",
        [
            (10.0, {"lr": 0.0001, "class_error": 90.12, "loss": 34.1234, "loss_ce": 5.1}),
            (10.0, {"lr": 0.0001, "class_error": 80.0, "loss": 30.0}),
        ],
    ),
    "pytorch_geometric": (
        "Epoch: 005, Loss: 1.9234, Train: 0.5123, Val: 0.4920, Test: 0.5010\n"
        "Epoch: 006, Loss: 1.9134, Train: 0.5223, Val: 0.4930, Test: 0.5020\n",
        [
            (5.0, {"loss": 1.9234}),
            (6.0, {"loss": 1.9134, "train": 0.5223, "val": 0.493, "test": 0.502}),
        ],
    ),
    "mxnet": (
        "INFO:root:Epoch[0] Batch [100]\tSpeed: 1234.56 samples/sec\taccuracy=0.912345\n"
        "INFO:root:Epoch[0] Train-accuracy=0.93\n"
        "INFO:root:Epoch[0] Time cost=12.300\n"
        "INFO:root:Epoch[0] Validation-accuracy=0.95\n",
        [
            (100.0, {"speed": 1234.56, "accuracy": 0.912345}),
            (0.0, {"train-accuracy": 0.93}),
            (0.0, {"validation-accuracy": 0.95}),
        ],
    ),
    "composer": (
        "[epoch=1][batch=10/100]:\n"
        "\t Train time/epoch: 0\n"
        "\t Train loss/train/total: 7.1234\n"
        "\t Train metrics/train/LanguagePerplexity: 123.4\n",
        [
            (110.0, {"train_loss/train/total": 7.1234}),
            (110.0, {"train_metrics/train/languageperplexity": 123.4}),
        ],
    ),
    "ignite": (
        "Training Results - Epoch: 1  Avg accuracy: 0.91 Avg loss: 0.30\n"
        "Validation Results - Epoch: 1  Avg accuracy: 0.92 Avg loss: 0.29\n"
        "ITERATION - loss: 0.412\n",
        [
            (1.0, {"avg_accuracy": 0.91, "avg_loss": 0.3}),
            (1.0, {"val_avg_accuracy": 0.92, "val_avg_loss": 0.29}),
            (1.0, {"loss": 0.412}),
        ],
    ),
    "torchtune": (
        "1|25|Loss: 1.2345:   3%|3         | 25/808 [00:20<10:12,  1.28it/s]\r",
        [(25.0, {"loss": 1.2345})],
    ),
    "skorch": (
        "  epoch    train_loss    valid_acc    valid_loss     dur\n"
        "-------  ------------  -----------  ------------  ------\n"
        "      1        \x1b[36m0.6905\x1b[0m       \x1b[32m0.6150\x1b[0m        \x1b[35m0.6749\x1b[0m  0.0520\n"
        "      2        0.6648       0.6450        0.6633  0.0312\n",
        [
            (1.0, {"train_loss": 0.6905, "valid_acc": 0.615, "valid_loss": 0.6749}),
            (2.0, {"train_loss": 0.6648, "valid_acc": 0.645, "valid_loss": 0.6633, "dur": 0.0312}),
        ],
    ),
    "trainer_eval_metrics": (
        "***** eval metrics *****\n"
        "  epoch                   =        3.0\n"
        "  eval_accuracy           =     0.8603\n"
        "  eval_loss               =     0.4123\n"
        "  eval_runtime            = 0:00:03.12\n"
        "  eval_samples            =        408\n"
        "  eval_samples_per_second =    130.721\n"
        "  perplexity              =     1.5103\n",
        [
            (3.0, {"eval_accuracy": 0.8603}),
            (3.0, {"eval_loss": 0.4123}),
            (3.0, {"perplexity": 1.5103}),
        ],
    ),
    "speechbrain": (
        "epoch: 1, lr: 1.00e+00 - train loss: 1.23 - valid loss: 1.01, valid CER: 12.3, valid WER: 34.5\n",
        [
            (
                1.0,
                {
                    "lr": 1.0,
                    "train_loss": 1.23,
                    "valid_loss": 1.01,
                    "valid_cer": 12.3,
                    "valid_wer": 34.5,
                },
            )
        ],
    ),
    "guided_diffusion": (
        "-------------------------\n"
        "| grad_norm  | 1.23     |\n"
        "| loss       | 0.123    |\n"
        "| loss_q0    | 0.3      |\n"
        "| mse        | 0.12     |\n"
        "| samples    | 1.28e+03 |\n"
        "| step       | 10       |\n"
        "-------------------------\n",
        [
            (
                10.0,
                {"grad_norm": 1.23, "loss": 0.123, "loss_q0": 0.3, "mse": 0.12, "samples": 1280.0},
            )
        ],
    ),
}
NO_VALUES = {
    "wandb at the end": (
        "\x1b[34m\x1b[1mwandb\x1b[0m: Run summary:\n\x1b[34m\x1b[1mwandb\x1b[0m:        acc 0.95\n"
        "[rank0]: wandb: train/loss 0.05\nwandb: step 19 loss=0.05\n"
    ),
    "comet at the end": "COMET INFO:     loss [20] : (0.05, 1.0)\nCOMET INFO: step 3 loss=0.1\n",
    "pip": (
        "Collecting torch==2.13.0\n"
        "  Downloading torch-2.13.0-cp311-none-linux.whl (180.1 MB)\n"
        "Successfully installed numpy-1.26.4 torch-2.13.0\n"
    ),
    "config": (
        "batch_size: 32\n"
        "lr: 0.001\n"
        "epochs: 10\n"
        "num_workers: 4\n"
        "seed=42\n"
        "Namespace(lr=0.001, epochs=10, steps=100, batch_size=64)\n"
    ),
    "server": (
        'INFO:     127.0.0.1:52345 - "GET /metrics/loss?step=3 HTTP/1.1" 200 OK\n'
        "listening on port 8080\n"
    ),
    "date": (
        "2026-11-29 10:00:01 Starting epoch 3\n"
        "Saving checkpoint at step 500\n"
        "loaded checkpoint-500 in 3.2s\n"
    ),
    "warn": (
        "/usr/lib/python3/site.py:123: UserWarning: lr_scheduler.step() called before optimizer.step() at line 34\n"
    ),
    "trace": (
        '  File "/work/train.py", line 12, in loss\n'
        '    raise ValueError("loss")\n'
        "RuntimeError: error 700 at step\n"
    ),
    "nvidia": (
        "| NVIDIA-SMI 550.54       Driver Version: 550.54    CUDA Version: 12.4 |\n"
        "|   0  A100  On | 00000000:07:00.0 Off |  0 |\n"
    ),
    "words": (
        "The loss of 3 packets was an error in 12 of 15 steps\n"
        "access granted to 12 users\n"
        "error: 404\n"
    ),
    "hf": (
        "***** Running training *****\n"
        "  Num examples = 1,000\n"
        "  Num Epochs = 3\n"
        "  Total optimization steps = 375\n"
    ),
    "pytest": ("tests/test_loss.py ....... [ 12%]\n12 passed, 1 error in 3.2s\n"),
    "docker": ("Step 3/10 : RUN pip install x\n ---> 12ab34cd\n"),
    "cmake": ("[ 12%] Building CXX object loss.cc.o\n"),
    "mem": ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.10 GiB total; 3 errors)\n"),
    "env": ("LOSS_SCALE=128 LR=0.1 python train.py\n"),
    "argparse": (
        "usage: train.py [--lr LR] [--loss LOSS]\n  --steps STEPS  number of steps (default: 100)\n"
    ),
    "kv": ("learning_rate ......... 0.001\nloss_scale ......... 1024\ntrain_iters ......... 500\n"),
    "git": ("commit 1234567 fix loss at step 3\n"),
    "accelerate_cfg": (
        "***** Running training *****\n"
        "  Gradient Accumulation steps = 1\n"
        "  Total optimization steps = 1100\n"
    ),
    "params": ("Total params: 1,234,567\nTrainable params: 1,234,567\nloss = CrossEntropyLoss()\n"),
    "time": ("took 12.3 s, error rate limit 5 at step 4\n"),
    "warn2": (
        "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. In PyTorch 1.1.0 and later\n"
    ),
    "accepted": ("accepted 3 connections, access log: 12 entries, score board 1\n"),
    "http": ('10.0.0.1 - - [29/Nov/2026:10:00:00 +0000] "GET /score?acc=0.5 HTTP/1.1" 200 512\n'),
    "apt": (
        "Get:12 http://packages.example/debian stable/main amd64 libaccinj64 amd64 11.8 [1,234 kB]\n"
        "Setting up libaccinj64-11.8 (11.8.89) ...\n"
    ),
    "lightgbm_start": (
        "[LightGBM] [Info] [binary:BoostFromScore]: pavg=0.490000 -> initscore=-0.040005\n"
        "[LightGBM] [Info] Start training from score -0.040005\n"
    ),
    "json_cfg": ('{"model": "loss", "lr": 0.1, "hidden": 12}\n'),
    "stop": (
        "Training loss did not improve more than tol=0.000100 for 10 consecutive epochs. Stopping.\n"
    ),
    "time cost": "INFO:root:Epoch[0] Time cost=12.300\n",
    "epoch and step": "Epoch 3, step 400: time 0.3, data: 0.1, mem: 2000\n" * 2,
    "board": "| Loss board 3 | cost sheet 4 |\n",
    "tb": ("TensorBoard 2.14.0 at http://localhost:6006/ (Press CTRL+C to quit)\n"),
}


def read(text: str) -> list[tuple[float | None, dict[str, float]]]:
    values = PrintedValues()
    return [*values.feed(text.encode()), *values.end()]


@pytest.mark.parametrize("name", LOGS)
def test_printed_values_are_found(name: str) -> None:
    text, expected = LOGS[name]
    assert read(text) == expected


@pytest.mark.parametrize("name", LOGS)
def test_output_may_come_in_any_pieces(name: str) -> None:
    text, expected = LOGS[name]
    for size in (1, 7, 64):
        values, data = PrintedValues(), text.encode()
        found = [
            each for at in range(0, len(data), size) for each in values.feed(data[at : at + size])
        ]
        assert [*found, *values.end()] == expected


@pytest.mark.parametrize("name", [*LOGS, *NO_VALUES])
def test_lines_of_a_loop_are_read_as_the_first_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third time on, a line that differs in its numbers only is read by its pattern."""
    text = LOGS[name][0] if name in LOGS else NO_VALUES[name]
    found = read(text * 4)
    monkeypatch.setattr(printed_values, "make_pattern", lambda *_: None)
    assert [(step, [*each.items()]) for step, each in found] == [
        (step, [*each.items()]) for step, each in read(text * 4)
    ]


@pytest.mark.parametrize(
    "line",
    [
        "step {0} loss=-{0}.5e-05 acc=0.83",
        "2026-01-01 10:00:{0}1,123 INFO step={0} loss={0}.25 mom=0.{0}",
        "{{'step': {0}, 'loss': {0}.5}}",
    ],
)
def test_a_pattern_reads_the_lines_of_a_loop(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{line.format(number)}\n".encode() for number in range(1, 6)]
    slow = [*PrintedValues().feed(b"".join(lines))]
    assert [step for step, _ in slow] == [1, 2, 3, 4, 5]
    values = PrintedValues()
    fast = [each for own in lines[:3] for each in values.feed(own)]
    monkeypatch.delattr(PrintedValues, "_read_line")
    fast += [each for own in lines[3:] for each in values.feed(own)]
    assert fast == slow


@pytest.mark.parametrize("name", NO_VALUES)
def test_lines_that_only_look_so_have_no_values(name: str) -> None:
    assert read(NO_VALUES[name]) == []


def test_what_changes_beside_a_value_is_one_from_then_on() -> None:
    found = read("step 1 loss=0.5 mom=0.9 tokens=10\nstep 2 loss=0.4 mom=0.9 tokens=20\n" * 2)
    assert [sorted(values) for _, values in found] == [
        ["loss"],
        ["loss", "tokens"],
        ["loss", "tokens"],
        ["loss", "tokens"],
    ]


@pytest.mark.parametrize(
    "line",
    [
        "loss " * 2000,
        "loss=" * 2000,
        "loss 1 " * 2000,
        "9" * 10_000 + " loss",
        "1," * 5000 + "loss: 1",
        "[1/" * 3000 + " loss",
        "|a|1|" * 2000,
        "\x1b[" * 4000 + "loss",
        "-" * 10_000 + "loss",
        "loss: 1e" + "9" * 4000,
        "\x00loss\x00= \x001",
        "loss 1/2 " * 500,
        "%(1/2) " * 500 + "loss",
        "(1):" * 1000 + "loss 1",
        "a(1): " * 700 + "loss 1",
        "│┃" * 2000 + "loss 1",
        "9%|" * 2000 + "loss 1",
        "\t" * 4000 + "loss 1",
        "| loss" + " " * 300 + "|" + " " * 300 + "x",
        "iter" + "1" * 600 + "[" * 600 + "loss 1",
    ],
)
def test_hostile_lines_are_read_in_a_moment(line: str) -> None:
    """A program that prints such lines must not slow its agent: each is cut before it is read."""
    for _ in range(20):
        for _, values in read(line + "\n"):
            assert all(math.isfinite(value) for value in values.values())
            assert all(len(name) <= 64 for name in values)


def test_the_pattern_of_a_cell_sees_no_runs_of_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In them, its parts would take turns: such a line once took minutes."""
    table = "-----\n| rollout/{0} |{0} |\n|{0}ep len{0}mean | 1 |{0}\n| loss{0}|{0}0.5{0}|\n-----\n"
    seen: list[str] = []
    pattern = printed_values._CELL

    class Seen:
        def match(self, line: str) -> object:
            seen.append(line)
            return pattern.match(line)

    monkeypatch.setattr(printed_values, "_CELL", Seen())
    long = read(table.format(" \t" * 300) + "| loss" + " " * 300 + "|" + " " * 300 + "x\n")
    assert len(seen) == 4
    assert not any("  " in line or "\t" in line for line in seen)
    assert (
        long == read(table.format(" ")) == [(None, {"rollout/ep_len_mean": 1, "rollout/loss": 0.5})]
    )


def test_a_phase_is_named_after_a_counted_iteration() -> None:
    line = "{0}: train [x] loss=0.5\n{0}: val [x] loss=0.4\n"
    for name in ("iter 12", "iter12", "iter_12", "Iteration #12"):
        found = [values for _, values in read(line.format(name))]
        assert found == [{"loss": 0.5}, {"val_loss": 0.4}]


def test_no_more_lines_are_read_than_the_budget_allows() -> None:
    values = PrintedValues()
    values.budget = 3
    assert len([*values.feed(b"loss=1 step=1\n" * 10)]) == 3
    values.budget = 2
    assert len([*values.feed(b"loss=1 step=1\n" * 10)]) == 2
