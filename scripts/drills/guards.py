"""Look for tests that came with the correction of a fault and are gone today.

    python scripts/drills/guards.py

Each commit `fix(room): ...` of the history is such a correction. A test is recognised by its name,
wherever it stands today. The table below says what became of those that have no successor of the
same name. The exit status is 1 if any other is gone.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests", "src/cavvy/providers/contract")  # the contract of clouds has tests, too
# former name of a test: what fails today for the same fault
SUCCESSORS = {
    "test_a_bucket_that_may_be_outside_the_allowed_regions_is_told_in_an_event": (
        "test_a_bucket_of_unknown_region_is_refused_until_its_region_is_stated"
    ),
    "test_a_checkpoint_that_is_damaged_everywhere_is_set_aside_on_all_nodes": (
        "test_nodes_download_what_is_missing_or_damaged_and_set_aside_what_is_damaged_everywhere"
    ),
    "test_a_connection_that_ends_is_made_again": "test_a_server_that_reconnects_keeps_its_leases",
    "test_a_crowd_is_served_before_more_connections_are_accepted": (
        "test_a_crowd_is_served_before_more_get_a_place"
    ),
    "test_a_download_that_fails_does_not_make_a_checkpoint_damaged": (
        "test_nodes_download_what_is_missing_or_damaged_and_set_aside_what_is_damaged_everywhere"
    ),
    "test_a_final_upload_that_failed_is_tried_again": (
        "test_a_final_upload_that_fails_is_completed_or_an_error_on_all_ranks"
    ),
    "test_a_final_upload_that_fails_twice_is_an_error_on_all_ranks": (
        "test_a_final_upload_that_fails_is_completed_or_an_error_on_all_ranks"
    ),
    "test_a_full_account_is_reported_as_a_quota": "launch_faults",  # rows of a contract
    "test_a_job_that_is_deleted_meanwhile_hides_no_other": (
        "test_a_job_that_is_deleted_between_the_list_and_its_tasks_hides_no_other"
    ),
    "test_a_lease_that_another_server_took_is_reported": (
        "test_a_killed_server_is_replaced_long_before_its_place_expires"  # it wakes up
    ),
    "test_a_lease_that_was_waited_for_is_as_long_as_any_other": (
        "test_a_takeover_waits_for_the_transaction_of_the_old_holder"  # in a later turn
    ),
    "test_a_model_without_keys_belongs_to_one_service": (
        "test_a_model_without_keys_belongs_to_one_service_of_its_project"
    ),
    "test_a_node_downloads_only_the_files_that_it_lacks": (
        "test_nodes_download_what_is_missing_or_damaged_and_set_aside_what_is_damaged_everywhere"
    ),
    "test_a_reader_that_leaves_early_is_not_answered_with_a_traceback": (
        "test_a_reader_that_leaves_early_is_no_failure"
    ),
    "test_a_redirect_must_not_leave_tls": "test_a_redirect_does_not_leave_tls",
    "test_a_region_that_fails_does_not_keep_machines_of_others": (
        "test_a_region_that_fails_hides_and_keeps_no_machines_of_others"
    ),
    "test_a_renewal_that_fails_for_another_reason_is_reported": (
        "test_a_server_that_cannot_renew_does_not_act"
    ),
    "test_a_reply_that_is_not_http_is_not_quoted": (
        "test_a_reply_that_is_not_http_is_quoted_in_part"
    ),
    "test_a_script_with_a_loop_of_its_own_ends_after_a_few_steps": (
        "test_a_script_with_a_run_and_a_loop_of_its_own_ends_after_a_few_steps"
    ),
    "test_a_service_keeps_a_model_in_its_residency": (
        "test_a_model_does_not_leave_its_residency_in_the_folder_of_a_job_or_service"
    ),
    "test_a_session_is_reached_by_its_machines_name": (
        "test_a_session_is_found_by_its_machines_name_only_on_request"
    ),
    "test_a_tpu_is_of_the_cloud_that_has_it": "test_a_tpu_is_of_the_clouds_that_have_it",
    "test_an_answer_that_arrives_byte_by_byte_has_a_time_limit": (
        "test_a_reply_that_arrives_byte_by_byte_has_a_time_limit"
    ),
    "test_an_interrupted_exec_says_that_its_command_continues": (
        "test_an_interrupted_exec_ends_its_command"  # it no longer continues
    ),
    "test_an_interrupted_job_with_checkpoints_has_only_the_rest_to_do": (
        "test_an_interrupted_job_has_only_the_rest_to_do"
    ),
    "test_arrivals_are_left_out_of_the_address_with_the_most": (
        "test_a_full_queue_leaves_out_connections_of_the_address_with_the_most"
    ),
    "test_batches_without_a_step_are_neither_lost_nor_repeated": (
        "test_a_loop_learns_the_same_if_a_notice_interrupts_it"  # its first two rows
    ),
    "test_credentials_are_not_uploaded": "test_a_file_of_credentials_is_a_secret",
    "test_flapping_spot_that_hardly_saves_is_left_alone": (
        "test_a_bet_on_spot_that_hardly_saves_costs_little"
    ),
    "test_known_integers_keep_their_values": "test_known_numbers_keep_their_values",
    "test_many_short_jobs_share_out_the_room_there_is": "test_twelve_short_jobs_take_turns",
    "test_new_keys_are_trusted_if_the_former_root_has_signed_them": (
        "test_a_device_that_was_offline_follows_all_new_keys"
    ),
    "test_of_two_that_wait_for_the_same_lease_the_second_finds_the_first_alive": (
        "test_servers_that_take_at_the_same_time_never_hold_the_same_lease"
    ),
    "test_offers_of_like_nodes_of_several_services_belong_to_none": (
        "test_offers_of_a_cluster_of_several_services_belong_to_none"
    ),
    "test_only_missing_capacity_lets_the_job_try_other_gpus": "launch_faults",  # rows of a contract
    "test_remudas_own_state_is_never_part_of_a_folder": (
        "test_cavvys_own_state_is_never_part_of_a_folder"
    ),
    "test_spot_that_may_have_returned_did_so_halfway_since_its_refusal": (
        "test_spot_that_may_have_returned_has_lasted_for_a_quarter_of_that_time"
    ),
    "test_step_time_of_models_to_whose_kernels_nothing_was_fitted": (
        "test_the_bars_of_families_that_are_left_out"
    ),
    "test_uploads_count_only_as_far_as_a_network_can_carry_them": (
        "test_sent_data_counts_only_as_far_as_a_network_can_carry_it"
    ),
    "test_what_a_cut_fetch_has_of_another_device_does_not_stay_on_the_disk": (
        "test_the_server_sends_a_file_whose_fetch_from_another_device_was_cut"
    ),
    "test_who_lost_the_lease_does_not_change_the_schema": (
        "test_a_server_that_is_too_old_to_share_is_named"  # servers share the schema
    ),
}
_TEST = re.compile(r"^\+\s*(?:async )?def (test_\w+)\(", re.MULTILINE)


def main() -> int:
    log = [
        "git",
        "log",
        "-p",
        "--unified=0",
        "--no-color",
        "--grep=^fix",
        "--format=",
        "--",
        *FOLDERS,
    ]
    history = subprocess.run(log, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    guards = set(_TEST.findall(history))
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    gone = sorted(
        name for name in guards if not {name, SUCCESSORS.get(name, name)}.intersection(words)
    )
    print(f"{len(guards)} tests came with corrections, {len(gone)} of them are gone")
    for name in gone:
        print(f"  {name}")
    if not guards:
        print("this clone has no history: git fetch --unshallow")
    return int(bool(gone) or not guards)


if __name__ == "__main__":
    sys.exit(main())
