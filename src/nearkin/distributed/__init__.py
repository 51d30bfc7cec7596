"""The only package that knows of processes and devices."""

from nearkin.distributed.devices import available_cpus as available_cpus
from nearkin.distributed.devices import check_gpus as check_gpus
from nearkin.distributed.devices import choose_device as choose_device
from nearkin.distributed.devices import cpus_per_process as cpus_per_process
from nearkin.distributed.devices import device_name as device_name
from nearkin.distributed.devices import fixed_shapes as fixed_shapes
from nearkin.distributed.devices import free_memory as free_memory
from nearkin.distributed.devices import has_amx as has_amx
from nearkin.distributed.devices import native_precision as native_precision
from nearkin.distributed.devices import threads_for as threads_for
from nearkin.distributed.devices import to_device as to_device
from nearkin.distributed.devices import to_host_async as to_host_async
from nearkin.distributed.launch import process_group as process_group
from nearkin.distributed.launch import training_group as training_group
from nearkin.distributed.ranks import all_reduce_max as all_reduce_max
from nearkin.distributed.ranks import broadcast_bytes as broadcast_bytes
from nearkin.distributed.ranks import data_parallel as data_parallel
from nearkin.distributed.ranks import failing_together as failing_together
from nearkin.distributed.ranks import gather as gather
from nearkin.distributed.ranks import gather_all as gather_all
from nearkin.distributed.ranks import group_of_rank as group_of_rank
from nearkin.distributed.ranks import is_main_process as is_main_process
from nearkin.distributed.ranks import mean_over_rows as mean_over_rows
from nearkin.distributed.ranks import num_processes as num_processes
from nearkin.distributed.ranks import rows_of_rank as rows_of_rank
from nearkin.distributed.ranks import world_size as world_size
